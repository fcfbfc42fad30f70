"""Charts: curves stay in their box, ticks are round, non-finite points are dropped."""

import re
from math import inf, nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carpool.dashboard.chart import MAX_POINTS, chart, round_ticks, thin, time_ticks

NUMBERS = st.floats(-1e9, 1e9)


@given(NUMBERS, NUMBERS)
def test_ticks_enclose_the_range_and_are_few(low: float, high: float) -> None:
    assume(high - low > 1e-6 * max(1.0, abs(low), abs(high)))
    ticks = round_ticks(low, high, 4)
    assert ticks[0] <= low + 1e-6 * (high - low)
    assert ticks[-1] >= high - 1e-6 * (high - low)
    assert 2 <= len(ticks) <= 7


def test_ticks_are_round() -> None:
    assert round_ticks(0.0, 1.0, 4) == [0.0, 0.5, 1.0]
    assert round_ticks(2.12, 2.41, 4) == [2.1, 2.2, 2.3, 2.4, 2.5]
    assert round_ticks(3.0, 3.0, 4)[0] < 3.0 < round_ticks(3.0, 3.0, 4)[-1]
    assert time_ticks(0.0, 7200.0, 5) == [0.0, 1800.0, 3600.0, 5400.0, 7200.0]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=50), st.booleans())
def test_curves_stay_in_their_box(points: list[tuple[float, float]], stepwise: bool) -> None:
    drawn = chart([("a", sorted(points))], stepwise=stepwise)
    (curve,) = drawn.curves
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", curve.path):
        assert -0.1 <= float(x) <= 1000.1
        assert -0.1 <= float(y) <= 100.1
    assert all(-1e-9 <= tick.position <= 1 + 1e-9 for tick in (*drawn.x_ticks, *drawn.y_ticks))


def test_non_finite_points_are_dropped() -> None:
    assert not chart([("a", [(0.0, nan), (1.0, inf)]), ("b", [])]).curves
    assert chart([("a", [(0.0, nan), (1.0, 2.0)])]).curves[0].ys == "2"


def test_thinning_keeps_the_last_point() -> None:
    points = [(float(n), 0.0) for n in range(1000)]
    assert len(thin(points)) <= MAX_POINTS
    assert thin(points)[-1] == (999.0, 0.0)


@pytest.mark.parametrize(
    ("since", "until", "labels"),
    [
        (0.0, 2.1, ["0 s", "0.5 s", "1 s", "1.5 s", "2 s"]),
        (36000.0, 41000.0, ["10 h", "10 h 30 min", "11 h"]),
        (100.0, 102.0, ["1 min 40 s", "1 min 40.5 s", "1 min 41 s", "1 min 41.5 s", "1 min 42 s"]),
    ],
)
def test_ticks_of_a_time_axis_have_different_labels(since: float, until: float, labels: list[str]) -> None:
    drawn = chart([("a", [(since, 0.0), (until, 1.0)])], over_time=True)
    assert [tick.label for tick in drawn.x_ticks] == labels


def test_a_logarithmic_time_axis_has_round_durations() -> None:
    drawn = chart([("a", [(1.0, 0.0), (60.0, 0.5), (3600.0, 1.0)])], over_time=True, is_log=True)
    assert [tick.label for tick in drawn.x_ticks] == ["1 s", "10 s", "1 min", "10 min", "1 h"]
    assert drawn.x_ticks[2].position == pytest.approx(0.5, abs=0.01)
