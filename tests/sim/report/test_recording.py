"""Recording keeps what happened, and what it thins keeps its area and its peaks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import Phase
from carpool.core.topology import Cluster
from carpool.sim.report.recording import CODE_OF, Holdings, NodeSpan, Recording, StepFunction, node_spans


def area(steps: StepFunction) -> float:
    """Integral from the first point to the last."""
    times = steps.at_s
    return sum(steps.value[place] * (times[place + 1] - times[place]) for place in range(len(times) - 1))


def held_area(holdings: Holdings) -> float:
    """Device-seconds, kept and dissolved."""
    columns = zip(holdings.first, holdings.stop, holdings.start_s, holdings.end_s, holdings.fraction, strict=True)
    kept = sum((stop - first) * (end - start) * part for first, stop, start, end, part in columns)
    return kept + sum(holdings.haze.cells.values())


def test_a_job_is_followed_from_submission_to_its_end() -> None:
    made = Recording(4)
    job = made.submitted("a", 5.0, 2, 3.0)
    assert (made.state[job], math.isnan(made.start_s[job])) == (CODE_OF[Phase.WAITING], True)
    made.held(job, 0, 2, 7.0, 9.0)
    made.held(job, 2, 4, 12.0, 20.0)
    assert made.state[job] == CODE_OF[Phase.RUNNING]
    made.ended(job, 20.0, 10.0)
    assert (made.submit_s[job], made.start_s[job], made.end_s[job], made.held_s[job]) == (5.0, 7.0, 20.0, 10.0)
    assert (made.devices[job], made.weight[job], made.finished()) == (2, 3.0, [job])
    assert made.span_s() == (5.0, 20.0)


def test_a_failed_job_is_over_but_not_finished() -> None:
    made = Recording(1)
    made.ended(made.submitted("a", 0.0, 1), 3.0, 1.0, Phase.FAILED)
    assert made.finished() == []


def test_a_holding_that_goes_on_unchanged_is_one_holding() -> None:
    made = Recording(4)
    job = made.submitted("a", 0.0, 3)
    for start in (0.0, 60.0, 120.0):  # one call a round, two runs of devices each
        made.held(job, 0, 2, start, start + 60.0)
        made.held(job, 3, 4, start, start + 60.0)
    made.held(job, 0, 2, 180.0, 200.0, 0.5)
    kept = made.holdings
    assert list(zip(kept.first, kept.start_s, kept.end_s, kept.fraction, strict=True)) == [
        (0, 0.0, 180.0, 1.0), (3, 0.0, 180.0, 1.0), (0, 180.0, 200.0, 0.5),
    ]  # fmt: skip


def test_the_last_sample_of_an_instant_counts_and_repeats_cost_nothing() -> None:
    made = Recording(4)
    for at, waiting in ((0.0, 3), (0.0, 1), (5.0, 1), (9.0, 2)):
        made.sample(at, waiting, 4)
    assert (list(made.queue.at_s), list(made.queue.value)) == ([0.0, 9.0], [1.0, 2.0])
    assert len(made.busy) == 1


def test_steps_refuse_to_go_back_in_time() -> None:
    steps = StepFunction()
    steps.add(5.0, 1.0)
    with pytest.raises(AssertionError, match="sample at 4"):
        steps.add(4.0, 2.0)


@given(st.lists(st.tuples(st.floats(0.001, 1e4), st.integers(0, 500)), min_size=3, max_size=300), st.integers(2, 40))
def test_coarse_steps_keep_area_and_peak(moves: list[tuple[float, int]], keep: int) -> None:
    steps, at = StepFunction(), 0.0
    for gap, value in moves:
        steps.add(at, float(value))
        at += gap
    full, num = steps.copy(), len(steps)
    steps.coarsen(keep)
    assert len(steps) <= max(2, keep)
    assert len(steps) + steps.num_merged == num
    assert area(steps) == pytest.approx(area(full))
    assert max(steps.peak) == max(full.value)
    assert (steps.at_s[0], steps.at_s[-1]) == (full.at_s[0], full.at_s[-1])


def test_a_long_calm_is_not_blurred_by_a_short_storm() -> None:
    steps = StepFunction()
    for place in range(100):
        steps.add(place * 0.01, float(place % 2))
    steps.add(1.0, 7.0)  # holds for a day
    steps.add(86_400.0, 0.0)
    steps.coarsen(10)
    assert steps.value[-2] == 7.0


def test_recording_stays_within_its_limits_and_counts_what_it_merged() -> None:
    steps = StepFunction(limit=100)
    for place in range(1_000):
        steps.add(float(place), float(place % 13))
    assert len(steps) <= 100
    assert len(steps) + steps.num_merged == 1_000


@given(
    st.lists(
        st.tuples(
            st.integers(0, 29), st.integers(1, 8), st.floats(0, 1e5), st.floats(0, 1e4), st.sampled_from([0.25, 1.0])
        ),
        min_size=5,
        max_size=120,
    )
)
def test_dissolved_holdings_keep_their_area(rows: list[tuple[int, int, float, float, float]]) -> None:
    holdings, total = Holdings(37, limit=10), 0.0
    for job, (first, width, start, length, fraction) in enumerate(rows):
        end = start + length
        holdings.add(job, first, first + width, start, end, fraction)
        total += width * (end - start) * fraction
    assert len(holdings) <= 10
    assert len(holdings) + holdings.num_dissolved == len(rows)
    assert held_area(holdings) == pytest.approx(total, abs=1e-6)


def test_the_longest_holdings_survive() -> None:
    holdings = Holdings(4, limit=1_000)
    for job in range(20):
        holdings.add(job, 0, 1, 100.0 * job, 100.0 * job + job + 1, 1.0)
    holdings.coarsen(5)
    assert list(holdings.job) == [15, 16, 17, 18, 19]
    assert (holdings.num_dissolved, holdings.longest_dissolved_s) == (15, 15.0)


def test_a_copy_is_independent() -> None:
    holdings = Holdings(4)
    for job in range(10):
        holdings.add(job, 0, 1, float(job), job + 0.5, 1.0)
    holdings.copy().coarsen(2)
    assert (len(holdings), holdings.num_dissolved, holdings.haze.cells) == (10, 0, {})


def test_marks_are_bounded_and_counted() -> None:
    made = Recording(1)
    for place in range(250):
        made.mark(float(place), "node lost")
    assert (len(made.marks), made.num_marks_dropped) == (200, 50)


def test_spans_follow_the_cluster() -> None:
    cluster = Cluster.build([(1, 2, "V100"), (1, 4, "K80")])
    assert node_spans(cluster) == (NodeSpan("n0", 0, 2, "V100"), NodeSpan("n1", 2, 6, "K80"))
