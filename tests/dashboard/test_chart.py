"""Curves stay in their box, marks are round, and what is not a number is not drawn."""

import re
from math import inf, nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carpool.dashboard.chart import POINTS, chart, round_marks, thin, time_marks

NUMBERS = st.floats(-1e9, 1e9)


@given(NUMBERS, NUMBERS)
def test_marks_enclose_and_are_few(low: float, high: float) -> None:
    assume(high - low > 1e-6 * max(1.0, abs(low), abs(high)))
    marks = round_marks(low, high, 4)
    assert marks[0] <= low + 1e-6 * (high - low)
    assert marks[-1] >= high - 1e-6 * (high - low)
    assert 2 <= len(marks) <= 7


def test_marks_are_round() -> None:
    assert round_marks(0.0, 1.0, 4) == [0.0, 0.5, 1.0]
    assert round_marks(2.12, 2.41, 4) == [2.1, 2.2, 2.3, 2.4, 2.5]
    assert round_marks(3.0, 3.0, 4)[0] < 3.0 < round_marks(3.0, 3.0, 4)[-1]
    assert time_marks(0.0, 7200.0, 5) == [0.0, 1800.0, 3600.0, 5400.0, 7200.0]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=50), st.booleans())
def test_curves_stay_in_their_box(points: list[tuple[float, float]], stepwise: bool) -> None:
    drawn = chart([("a", sorted(points))], stepwise=stepwise)
    (curve,) = drawn.curves
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", curve.path):
        assert -0.1 <= float(x) <= 1000.1
        assert -0.1 <= float(y) <= 100.1
    assert all(-1e-9 <= tick.place <= 1 + 1e-9 for tick in (*drawn.across, *drawn.up))


def test_what_is_not_a_number_is_left_out() -> None:
    assert not chart([("a", [(0.0, nan), (1.0, inf)]), ("b", [])]).curves
    assert chart([("a", [(0.0, nan), (1.0, 2.0)])]).curves[0].ys == "2"


def test_thinning_keeps_the_last() -> None:
    points = [(float(n), 0.0) for n in range(1000)]
    assert len(thin(points)) <= POINTS
    assert thin(points)[-1] == (999.0, 0.0)


def test_a_logarithmic_axis_has_marks_at_lengths_of_time() -> None:
    drawn = chart([("a", [(1.0, 0.0), (60.0, 0.5), (3600.0, 1.0)])], over_time=True, is_log=True)
    assert [tick.words for tick in drawn.across] == ["1 s", "10 s", "1 min", "10 min", "1 h"]
    assert drawn.across[2].place == pytest.approx(0.5, abs=0.01)
