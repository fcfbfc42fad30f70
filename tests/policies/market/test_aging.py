"""Waiting credit grows while a job waits, whatever the queue does, and is kept."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.draft import Draft
from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.messages import JobSubmitted
from carpool.core.model import Allocation, Job, JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.market.aging import WaitingClocks, aged, classes_of, overdue, patience_of
from carpool.policies.market.knapsack import Floats
from carpool.policies.market.policy import Carpool
from carpool.sim.traces.trace import Arrival
from carpool.testing import drive


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
        lengths = lengths_of([length, *queue])
        clocks.advance(at, patience_of(lengths, classes_of(lengths), 4.0, 600.0), first=0.0)
        (credit,) = clocks.credit([job], classes_of(lengths[:1]), at).tolist()
        assert credit >= before - 1e-9 * max(1.0, before)
        before = credit


@given(queues)
def test_shorter_jobs_never_wait_longer_for_credit(queue: list[float]) -> None:
    lengths = lengths_of(queue)
    patience = patience_of(lengths, classes_of(lengths), 4.0, 600.0)
    assert (patience >= 600.0).all()
    assert (np.diff(classes_of(np.sort(lengths))) >= 0).all()


def test_a_job_alone_in_its_class_is_not_slowed_by_itself() -> None:
    lengths = lengths_of([1e6])
    assert patience_of(lengths, classes_of(lengths), 1.0, 600.0).tolist() == [600.0] * 8


class Halved(DeclaredEstimator):
    """Other devices than V100 have half its rate."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(1.0 if placement.groups[0][0] == "V100" else 0.5)


def paces(cluster: Cluster, *jobs: tuple[float, float]) -> list[float]:
    """Seconds for a unit of credit in each class, with jobs of these lengths and weights."""
    scheduler = Scheduler(cluster, Fifo(), estimator=Halved())
    specs = [JobSpec(JobId(f"j{place}"), 1, work, weight=weight) for place, (work, weight) in enumerate(jobs)]
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    view = scheduler.snapshot()
    note: Any = Carpool().plan(view).note
    found: list[float] = WaitingClocks.of(note, view).patience_s.tolist()
    return found


@pytest.mark.parametrize(("slow", "seconds"), [("V100", 2_000.0), ("K80", 2_000.0 / 0.75)])
def test_slow_devices_lengthen_the_time_that_shorter_jobs_need(slow: str, seconds: float) -> None:
    found = paces(Cluster.build([(1, 1, "V100"), (1, 1, slow)]), (1e5, 1.0), *[(1_000.0, 1.0)] * 4)
    assert found[6] == pytest.approx(1.5 * seconds)


def test_a_job_of_small_weight_counts_the_longer_jobs_of_large_weight_before_it() -> None:
    found = paces(Cluster.build([(1, 1, "V100")]), (4_000.0, 8.0), (2_000.0, 1.0), (2_000.0, 0.1))
    assert (found[2], found[3], found[5]) == (600.0, 1.5 * 4_000.0, 1.5 * 6_000.0)


def test_weights_double_with_every_unit_beyond_the_first() -> None:
    assert aged(np.ones(4), np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [1.0, 1.0, 2.0, 8.0]


def test_credit_is_kept_at_start_and_release_and_in_the_note() -> None:
    scheduler = submitted("a", "b")
    view = scheduler.snapshot()
    a, b = view.jobs[JobId("a")], view.jobs[JobId("b")]
    clocks, classes = WaitingClocks(), classes_of(lengths_of([3600.0, 3600.0]))
    clocks.advance(0.0, np.full(8, 600.0), first=0.0)
    credit = clocks.credit([a, b], classes, 6000.0)
    assert credit.tolist() == [0.0, 10.0]
    draft = Draft(view)
    draft.release(a)
    draft.assign(b, Allocation.of(0))
    clocks.keep([a, b], credit, draft)
    read = WaitingClocks.of(json.loads(json.dumps({"waiting": clocks.note()})), view)
    assert read.earned == {"b": 10.0}
    running = b._replace(desired=Allocation.of(0), since=6000.0)
    assert read.credit([running], classes[:1], 6600.0).tolist() == [10.0]  # what it had at its start, and no more
    assert read.credit([a], classes[:1], 6600.0).tolist() == [0.0]  # one that never waited does not


def test_marks_are_thinned_and_old_ones_left_out() -> None:
    clocks = WaitingClocks()
    for number in range(500):
        clocks.advance(10.0 * number, np.full(8, 600.0 if number % 2 else 6000.0), first=0.0)
    assert len(clocks.times) <= 65
    clocks.advance(5000.0, np.full(8, 1e6), first=4990.0)
    assert len(clocks.times) <= 3


def test_every_preemption_after_the_first_doubles_what_the_next_has_to_save() -> None:
    job = submitted("a").jobs[JobId("a")]
    factors = [WaitingClocks(stops={job.id: count}).preemption_factors([job])[0] for count in range(5)]
    assert factors == [1.0, 1.0, 2.0, 4.0, 8.0]


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([0.1, 1.0, 10.0]), st.floats(5.0, 60.0), st.integers(1, 64))
def test_the_number_of_preemptions_follows_the_cost_of_a_move(move_s: float, length_s: float, weight: int) -> None:
    """Factor 2^n on a move's cost exceeds the gain of any of the short jobs after a logarithmic number of times."""
    long = Arrival(0.0, JobSpec(JobId("long"), 1, 10_000.0))
    spec = JobSpec(JobId(""), 1, length_s, weight=float(weight))
    short = [Arrival(50.0 + 100.0 * place, replace(spec, id=JobId(f"s{place}"))) for place in range(120)]
    run = drive(Carpool(move_s=move_s, patience_s=1e9), Cluster.build([(1, 1, "V100")]), [long, *short])
    changes = [change for record in run.records for change in (record.planned.changes if record.planned else ())]
    stops = [change.job for change in changes if change.allocation is None].count(long.spec.id)
    most = 2 + log2(1.0 + weight * 20_000.0 / length_s * 1_000.0 / move_s)
    assert 0 < stops <= most, f"{stops} preemptions, at most {most:.1f} of 120"


def test_notes_of_before_preemptions_were_counted_are_read() -> None:
    scheduler = submitted("a")
    clocks = WaitingClocks(np.array([0.0]), np.zeros((1, 8)), np.ones(8), {}, {JobId("a"): 2})
    note = clocks.note()
    assert WaitingClocks.of({"waiting": note}, scheduler.snapshot()).stops == {"a": 2}
    assert WaitingClocks.of({"waiting": note[:4]}, scheduler.snapshot()).stops == {}


def test_the_job_that_waited_longest_is_overdue() -> None:
    scheduler = submitted("a", "b", "c")
    jobs, hour = list(scheduler.jobs.values()), 3600.0
    short, long = lengths_of([hour] * 3), lengths_of([hour, 8.0 * hour, 8.0 * hour])
    for at, lengths, wait_s, is_overdue in (
        (1.9 * hour, short, hour, False),  # the two that wait need 2 hours
        (2.1 * hour, short, hour, True),
        (2.1 * hour, short, 0.0, False),
        (2.1 * hour, short, 3.0 * hour, False),
        (15.9 * hour, long, hour, False),
        (16.1 * hour, long, hour, True),
    ):
        scheduler = submitted("a", "b", "c")
        scheduler.handle(at, [])
        found = overdue(scheduler.snapshot(), jobs, lengths, wait_s).tolist()
        assert [credit > 0.0 for credit in found] == [False, is_overdue, False], (at, wait_s)


def test_as_many_jobs_are_overdue_as_fit_into_a_tenth_of_the_devices() -> None:
    scheduler = Scheduler(Cluster.build([(1, 40, "cpu")]), Fifo())
    widths = (40, 2, 1, 2, 1)  # the first one runs and holds all devices
    scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId(str(i)), width, 9.0)) for i, width in enumerate(widths)])
    scheduler.handle(7200.0, [])
    jobs = list(scheduler.jobs.values())
    found = overdue(scheduler.snapshot(), jobs, lengths_of([9.0] * 5), 3600.0).tolist()
    assert [credit > 0.0 for credit in found] == [False, True, True, False, False]


def test_jobs_that_could_take_all_or_the_fastest_devices_are_never_overdue() -> None:
    for cluster, most in (
        (Cluster.build([(1, 1, "cpu")]), 1),
        (Cluster.build([(1, 1, "cpu")]), 2),
        (Cluster.build([(1, 1, "V100"), (1, 1, "K80")]), 1),
    ):
        scheduler = Scheduler(cluster, Fifo())
        scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId(str(i)), 1, 9.0, max_devices=most)) for i in range(3)])
        scheduler.handle(7200.0, [])
        found = overdue(scheduler.snapshot(), list(scheduler.jobs.values()), lengths_of([9.0] * 3), 3600.0)
        assert found.any() == (most == 1 and len(cluster.kinds) == 1)


def test_an_overdue_long_job_starts_earlier_in_a_stream_of_short_ones() -> None:
    long = Arrival(1.0, JobSpec(JobId("long"), 1, 10_000.0))
    short = [Arrival(490.0 * place, JobSpec(JobId(f"s{place}"), 1, 500.0, weight=1024.0)) for place in range(80)]
    starts = []
    for wait_s in (0.0, 1800.0):
        arrivals = [short[0], long, *short[1:]]
        run = drive(Carpool(wait_s=wait_s), Cluster.build([(1, 1, "V100")]), arrivals)
        plans = [record for record in run.records if record.planned is not None]
        starts.append(
            next(
                record.at
                for record in plans
                if record.planned and any(change.job == long.spec.id for change in record.planned.changes)
            )
        )
    assert starts[1] < starts[0], starts
