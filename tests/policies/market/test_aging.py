"""Waiting credit grows while a job waits, whatever the queue does, and is kept."""

import json
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.draft import Draft
from carpool.core.messages import JobSubmitted
from carpool.core.model import Allocation, Job, JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.market.aging import WaitingClocks, aged, classes_of, patience_of
from carpool.policies.market.knapsack import Floats


def submitted(*names: str) -> Scheduler:
    """A scheduler whose only device runs the first of the jobs."""
    scheduler = Scheduler(Cluster.build([(1, 1, "cpu")]), Fifo())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId(name), 1, 3600.0)) for name in names])
    return scheduler


def waiting(since: float) -> Job:
    return submitted("a", "b").jobs[JobId("b")]._replace(since=since)


def lengths_of(seconds: Sequence[float]) -> Floats:
    return np.array(seconds, np.float64)


queues = st.lists(st.floats(0.0, 1e7), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.floats(0.0, 1e5), queues), min_size=1, max_size=60), st.floats(0.0, 1e6))
def test_a_longer_queue_never_takes_credit_away(steps: list[tuple[float, list[float]]], length: float) -> None:
    clocks, at, job = WaitingClocks(), 0.0, waiting(0.0)
    before = 0.0
    for gap, queue in steps:
        at += gap
        clocks.advance(at, patience_of(lengths_of([length, *queue]), 4.0, 600.0), first=0.0)
        (credit,) = clocks.credit([job], lengths_of([length]), at).tolist()
        assert credit >= before - 1e-9 * max(1.0, before)
        before = credit


@given(queues)
def test_shorter_jobs_never_wait_longer_for_credit(queue: list[float]) -> None:
    patience = patience_of(lengths_of(queue), 4.0, 600.0)
    assert (patience >= 600.0).all()
    assert (np.diff(classes_of(np.sort(lengths_of(queue)))) >= 0).all()


def test_a_job_alone_in_its_class_is_not_slowed_by_itself() -> None:
    assert patience_of(lengths_of([1e6]), 1.0, 600.0).tolist() == [600.0] * 8


def test_weights_double_with_every_unit_beyond_the_first() -> None:
    assert aged(np.ones(4), np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [1.0, 1.0, 2.0, 8.0]


def test_credit_is_kept_at_start_and_release_and_in_the_note() -> None:
    scheduler = submitted("a", "b")
    view = scheduler.snapshot()
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    clocks, lengths = WaitingClocks(), lengths_of([3600.0, 3600.0])
    clocks.advance(0.0, np.full(8, 600.0), first=0.0)
    credit = clocks.credit([a, b], lengths, 6000.0)
    assert credit.tolist() == [0.0, 10.0]
    draft = Draft(view)
    draft.release(a)
    draft.assign(b, Allocation.of(0))
    clocks.keep([a, b], credit, draft)
    read = WaitingClocks.of(json.loads(json.dumps({"waiting": clocks.note()})), view)
    assert read.earned == {"b": 10.0}
    running = b._replace(desired=Allocation.of(0), since=6000.0)
    assert read.credit([running], lengths[:1], 6600.0).tolist() == [11.0]  # it earns on, else b's place would be lost
    assert read.credit([a], lengths[:1], 6600.0).tolist() == [0.0]  # one that never waited does not


def test_marks_are_thinned_and_old_ones_left_out() -> None:
    clocks = WaitingClocks()
    for number in range(500):
        clocks.advance(10.0 * number, np.full(8, 600.0 if number % 2 else 6000.0), first=0.0)
    assert len(clocks.times) <= 65
    clocks.advance(5000.0, np.full(8, 1e6), first=4990.0)
    assert len(clocks.times) <= 3
