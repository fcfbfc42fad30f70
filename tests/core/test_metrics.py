"""Figures worked out by hand."""

from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import (
    Change,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Planned,
    Record,
)
from carpool.core.metrics import Metrics, nearest_rank
from carpool.core.model import Allocation, JobId, JobSpec, NodeId
from carpool.core.topology import Cluster

A, B, C = JobId("a"), JobId("b"), JobId("c")


def submit(name: str, weight: float = 1.0) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), weight=weight))


def told(*records: tuple[float, list[Fact], dict[str, Allocation | None]]) -> Metrics:
    """Metrics after these records: instant, facts, changes."""
    metrics = Metrics(Cluster.build([(2, 2, "V100")]))
    for at, facts, changes in records:
        made = tuple(Change(JobId(name), held) for name, held in changes.items())
        metrics.record(Record(at, facts, Planned("x", made, (1.0,) * len(made)) if made else None))
    return metrics


def test_two_jobs_by_hand() -> None:
    """a: submitted 10, holds two devices 10–30; b: submitted 10, holds one device 30–40, then 50–70."""
    summary = told(
        (10.0, [submit("a", 3.0), submit("b")], {"a": Allocation.of(0, 1)}),
        (30.0, [JobFinished(A, 1)], {"b": Allocation.of(0)}),
        (40.0, [], {"b": None}),
        (50.0, [], {"b": Allocation.of(2)}),
        (70.0, [JobFinished(B, 3)], {}),
    ).summary()
    assert (summary.jobs, summary.finished) == (2, 2)
    assert summary.avg_jct_s == (20 + 60) / 2
    assert (summary.p50_jct_s, summary.p99_jct_s) == (20.0, 60.0)
    assert summary.avg_wait_s == (0 + 30) / 2
    assert summary.makespan_s == 60.0
    assert summary.weighted_jct_s == (3 * 20 + 1 * 60) / 4
    assert summary.utilisation == (2 * 20 + 10 + 20) / (4 * 60)
    assert (summary.preemptions, summary.resizes) == (1, 0)


def test_losses_of_all_devices() -> None:
    """A crash, a lost node and a plan count; a pause is the user's own wish."""
    metrics = told(
        (0.0, [submit("a"), submit("b"), submit("c")], {"a": Allocation.of(0), "b": Allocation.of(2, 3)}),
        (5.0, [NodeLost(NodeId(1))], {"c": Allocation.of(1)}),
        (6.0, [JobCrashed(A, 1, 0.0, "?")], {}),
        (7.0, [JobPaused(C)], {}),
        (9.0, [JobCancelled(A), JobCancelled(B), JobFailed(C, 2, "?")], {}),
    )
    summary = metrics.summary()
    assert (summary.preemptions, summary.finished) == (2, 0)
    assert metrics.device_s == 5 * 2 + 6 + 2
    assert summary.utilisation == 18 / (4 * 9)
    assert isnan(summary.avg_jct_s)
    assert isnan(summary.weighted_jct_s)
    assert isnan(summary.p99_jct_s)


def test_device_seconds_of_jobs_that_are_not_over_count() -> None:
    """A job that crashed for the last time, or is paused for ever, did hold its devices."""
    metrics = told(
        (0.0, [submit("a"), submit("b")], {"a": Allocation.of(0), "b": Allocation.of(1)}),
        (4.0, [JobCrashed(A, 1, 0.0, "?")], {}),
        (10.0, [JobFinished(B, 1)], {}),
    )
    assert metrics.device_s == 4 + 10


def test_a_resize_is_a_change_of_devices() -> None:
    metrics = told(
        (0.0, [submit("a")], {"a": Allocation.of(0)}),
        (1.0, [], {"a": Allocation.of(0, 1)}),
        (2.0, [], {"a": Allocation.of(0, 1, batch_size=64)}),  # another batch on the same devices
        (3.0, [], {"a": Allocation.of(2, 3)}),
    )
    assert metrics.resizes == 2


def test_a_node_that_joined_may_be_lost() -> None:
    metrics = told(
        (0.0, [submit("a"), NodeJoined("more", (("K80", 4, 0),)), NodeJoined("n0")], {"a": Allocation.of(4)}),
        (5.0, [NodeLost(NodeId(2))], {}),
        (10.0, [JobCancelled(A)], {}),
    )
    assert metrics.preemptions == 1
    assert metrics.summary().utilisation == 5 / (8 * 10)


def test_nothing_at_all() -> None:
    summary = told().summary()
    assert (summary.jobs, summary.finished, summary.preemptions) == (0, 0, 0)
    assert isnan(summary.makespan_s)
    assert isnan(summary.utilisation)


def test_an_instant_has_no_utilisation() -> None:
    summary = told((5.0, [submit("a")], {"a": Allocation.of(0)}), (5.0, [JobFinished(A, 1)], {})).summary()
    assert (summary.makespan_s, summary.avg_jct_s) == (0.0, 0.0)
    assert isnan(summary.utilisation)


@pytest.mark.parametrize(
    ("count", "fraction", "rank"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (101, 0.99, 100), (5, 0.0, 1)],
)
def test_nearest_rank(count: int, fraction: float, rank: int) -> None:
    assert nearest_rank([float(each) for each in range(1, count + 1)], fraction) == rank


@given(st.lists(st.floats(0, 100), min_size=1), st.sampled_from((0.5, 0.99)))
def test_enough_values_do_not_exceed_it(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    found = nearest_rank(ordered, fraction)
    assert sum(each <= found for each in ordered) >= fraction * len(ordered) - 1e-9
    assert sum(each < found for each in ordered) < fraction * len(ordered)


def test_a_device_that_is_promised_twice_is_used_once() -> None:
    """Device 0 is promised 1.5 times from 0 to 10 and half from 10 to 20; device 1 wholly to one, 0 to 20."""
    summary = told(
        (0.0, [submit("a"), submit("b"), submit("c")], {"a": Allocation.of(0), "b": Allocation.of(0, fraction=0.5)}),
        (0.0, [], {"c": Allocation.of(1)}),
        (10.0, [JobFinished(A, 1)], {}),
        (20.0, [JobFinished(B, 1), JobFinished(C, 1)], {}),
    ).summary()
    assert summary.utilisation == (10 + 0.5 * 10 + 20) / (4 * 20)
