"""Distributions, percentiles and size classes."""

from __future__ import annotations

from carpool.core.model import Phase
from carpool.sim.report.curves import (
    by_size,
    class_bounds,
    completion_times,
    distribution,
    waiting_times,
)
from carpool.sim.report.recording import Recording
from carpool.sim.report.units import digits, duration, unit_for


def test_unfinished_jobs_keep_the_curve_below_one() -> None:
    curve = distribution([3.0, 1.0], num_jobs=4, limit=10)
    assert (curve.value, curve.share) == ((1.0, 3.0), (0.25, 0.5))


def test_a_thinned_curve_keeps_both_ends_and_stays_small() -> None:
    curve = distribution(map(float, range(100_000)), 100_000, 500)
    assert (curve.value[0], curve.value[-1], curve.share[-1]) == (0.0, 99_999.0, 1.0)
    assert len(curve.value) <= 500 + 128


def test_times_count_finished_jobs_only() -> None:
    made = Recording(2)
    made.ended(made.submitted("a", 2.0, 1), 12.0, 4.0)
    made.ended(made.submitted("b", 3.0, 1), 5.0, 1.0, Phase.FAILED)
    made.submitted("c", 4.0, 1)
    assert (completion_times(made), waiting_times(made)) == ([10.0], [6.0])


def test_few_sizes_stand_alone_and_many_are_grouped() -> None:
    assert class_bounds([4, 1, 4]) == ((1, 1), (4, 4))
    assert class_bounds(range(1, 17)) == ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16))


def test_a_class_without_finished_jobs_has_no_times() -> None:
    made = Recording(8)
    made.ended(made.submitted("a", 0.0, 1), 10.0, 10.0)
    made.submitted("b", 0.0, 8)
    small, large = by_size(made, class_bounds(made.devices))
    assert (small.label, small.avg_s, small.p99_s) == ("1", 10.0, 10.0)
    assert (large.num_jobs, large.num_finished, large.avg_s) == (1, 0, None)


def test_durations_read_well() -> None:
    assert [duration(value) for value in (0.0, 0.05, 42.0, 600.0, 7200.0, 864_000.0)] == [
        "0 s", "0.0500 s", "42.0 s", "10.0 min", "2.00 h", "10.0 d",
    ]  # fmt: skip
    assert unit_for([0.0, float("nan"), 90_000.0]).name == "h"
    assert digits(21_395.4) == "21,395"
