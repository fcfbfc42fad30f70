"""The default policy: near the known optima, starvation-free, careful with beliefs, and able to say why."""

from dataclasses import replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.errors import CarpoolError
from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.messages import (
    Assign,
    AssignApplied,
    JobFinished,
    JobSubmitted,
    LimitsChanged,
    ProgressReported,
    Record,
    Woke,
)
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.policies.baselines.afs import Afs
from carpool.policies.market.policy import Carpool, Elastic
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import PlainWorld
from carpool.testing.driver import drive
from carpool.testing.scenarios import job
from tests.support.scaling_world import ScalingWorld

ONE = Cluster.build([(1, 1, "V100")])
EIGHT = Cluster.build([(1, 8, "V100")])


def held(scheduler: Scheduler) -> dict[str, int]:
    return {name: 0 if job.desired is None else job.desired.num_devices for name, job in scheduler.jobs.items()}


class Paired(DeclaredEstimator):
    """Two on a device slow each other down to 0.8."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(0.8 if placement.neighbours else placement.fraction)


class Tuned(DeclaredEstimator):
    """A batch of 128 is the best alone; two on a device keep most of their speed; memory grows with the batch."""

    predicts_goodput = True
    curve: ClassVar[dict[int, float]] = {64: 1.0, 128: 1.25, 256: 1.1, 2048: 0.5}  # by batch; the job's own is 64

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        kept = 0.9 if placement.neighbours else 1.0
        return Estimate(kept * self.goodput(spec, Kind("V100"), placement.batch_size).mean)

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        return Estimate(float(np.interp(batch_size or 64, list(self.curve), list(self.curve.values()))))

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return 10 * (batch_size or 64)


class Guessing(DeclaredEstimator):
    """Rates are only believed."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(float(placement.num_devices), 0.5)


@pytest.mark.parametrize("policy", [Carpool(), Elastic()])
@pytest.mark.parametrize("exponent", [0.5, 0.9])
def test_a_batch_ends_as_soon_as_the_optimum_lets_it(policy: Policy, exponent: float) -> None:
    sizes = np.random.default_rng(3).lognormal(6.0, 1.0, 8)
    arrivals = [
        Arrival(0.0, JobSpec(JobId(f"j{i}"), 1, float(size), min_devices=1, max_devices=64))
        for i, size in enumerate(sizes)
    ]
    cluster, world = Cluster.build([(1, 64, "V100")]), ScalingWorld(exponent=exponent)
    ours = simulate(arrivals, cluster, policy, world).summary().avg_jct_s
    exact = simulate(arrivals, cluster, Afs(ahead=True), world).summary().avg_jct_s
    assert ours <= 1.02 * exact


def test_under_a_steady_stream_jobs_share_evenly_enough() -> None:
    random, at, arrivals = Random(12), 0.0, []
    for number in range(120):
        at += random.expovariate(0.8 * 64 / (8 * 600.0))
        size = random.lognormvariate(np.log(600.0) - 0.5, 1.0)
        arrivals.append(Arrival(at, JobSpec(JobId(f"j{number}"), 8, size, min_devices=1, max_devices=64)))
    cluster, world = Cluster.build([(1, 64, "V100")]), ScalingWorld(exponent=0.7)
    ours = simulate(arrivals, cluster, Carpool(), world).summary().avg_jct_s
    even = simulate(arrivals, cluster, Afs(), world).summary().avg_jct_s
    assert ours <= 1.02 * even, "newcomers take the place of a good part of those who leave"


def test_weighted_gangs_are_served_no_later_than_by_remaining_time_over_weight() -> None:
    random = np.random.default_rng(1)
    arrivals = [
        job(f"j{i}", int(random.choice([1, 2, 4])), float(random.lognormal(3.0, 1.0)), at=float(i), weight=1.0 + i % 5)
        for i in range(60)
    ]
    ours, theirs = (
        simulate(arrivals, EIGHT, parse_policy(name)).summary().weighted_jct_s for name in ("carpool", "wsrtf")
    )
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize(("patience_s", "waits"), [(1e9, True), (50.0, False)])
def test_nobody_waits_for_ever(patience_s: float, waits: bool) -> None:
    stream = [job(f"s{i}", work=10.0, at=10.0 * i) for i in range(100)]
    run = drive(Carpool(patience_s=patience_s), ONE, [job("long", work=60.0), *stream], PlainWorld())
    ended = {fact.job: record.at for record in run.records for fact in record.facts if isinstance(fact, JobFinished)}
    assert (ended[JobId("long")] > 1_000.0) is waits


@pytest.mark.parametrize("gap_s", [58.0, 60.0])
def test_a_long_job_behind_a_stream_of_short_ones_starts_within_hours_and_stays(gap_s: float) -> None:
    stream = [job(f"s{i}", work=60.0, at=gap_s * i) for i in range(400)]
    run = drive(Carpool(), ONE, [job("long", work=3600.0), *stream], PlainWorld())
    plans = [(record.at, record.planned) for record in run.records if record.planned is not None]
    changes = [(at, change) for at, planned in plans for change in planned.changes if change.job == "long"]
    assert changes[0][0] < 2 * 3600.0
    assert len(changes) <= 3
    ended = {fact.job: record.at for record in run.records for fact in record.facts if isinstance(fact, JobFinished)}
    assert ended[JobId("long")] < 400 * gap_s  # before the stream ends


def test_jobs_share_a_device_only_where_that_is_believed_to_help() -> None:
    for estimator, running in ((Paired(), 2), (DeclaredEstimator(), 1)):
        scheduler = Scheduler(ONE, Carpool(), estimator=estimator)
        scheduler.handle(0.0, [JobSubmitted(job(name).spec) for name in ("a", "b")])
        assert scheduler.num_running == running
    scheduler = Scheduler(ONE, Carpool(together=1), estimator=Paired())
    scheduler.handle(0.0, [JobSubmitted(job(name).spec) for name in ("a", "b")])
    assert scheduler.num_running == 1


@pytest.mark.parametrize(
    ("names", "memory_bytes", "batches"),
    [("a", 10_000, {128}), ("ab", 10_000, {128}), ("ab", 2_400, {64, 128}), ("ab", 1_600, {64})],
)
def test_batches_are_the_best_alone_and_halved_until_they_fit_together(
    names: str, memory_bytes: int, batches: set[int]
) -> None:
    node = ONE.nodes[0]
    banks = tuple(replace(bank, memory_bytes=memory_bytes) for bank in node.banks)
    cluster = Cluster((replace(node, banks=banks),), ONE.links)
    scheduler = Scheduler(cluster, Carpool(), estimator=Tuned())
    specs = [JobSpec(JobId(name), 1, 100.0, "m", 64, batch_range=(64, 2048), memory_bytes=640) for name in names]
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    held = [job.desired for job in scheduler.jobs.values()]
    assert {found.batch_size for found in held if found is not None} == batches
    assert None not in held
    told = [scheduler.policy.details(scheduler.snapshot(), job) for job in scheduler.jobs.values()]
    assert any("batch size 128" in words for words in told) == (128 in batches)


def test_an_exact_job_keeps_its_devices_to_itself() -> None:
    scheduler = Scheduler(ONE, Carpool(), estimator=Paired())
    scheduler.handle(0.0, [JobSubmitted(replace(job("a").spec, exact=True)), JobSubmitted(job("b").spec)])
    assert scheduler.num_running == 1


def test_a_job_grows_step_by_step_while_its_rates_are_only_believed() -> None:
    wide = JobSpec(JobId("a"), 1, 1e6, min_devices=1, max_devices=64)
    widths = []
    scheduler = Scheduler(Cluster.build([(16, 4, "V100")]), Carpool(growth=4), estimator=Guessing())
    scheduler.handle(0.0, [JobSubmitted(wide)])
    for _ in range(3):
        widths.append(held(scheduler)["a"])
        assert scheduler.wake_at is not None
        scheduler.handle(scheduler.wake_at, [])
    assert widths == [4, 16, 64]


def test_jobs_that_have_never_run_begin_beside_each_other() -> None:
    scheduler = Scheduler(Cluster.build([(1, 2, "V100")]), Carpool(), estimator=Guessing())
    jobs = [JobSpec(JobId(name), 1, work, min_devices=1, max_devices=2) for name, work in (("a", 9.0), ("b", 5.0))]
    scheduler.handle(0.0, [JobSubmitted(job) for job in jobs])
    assert held(scheduler) == {"a": 1, "b": 1}


def test_unlike_devices_are_spanned_where_there_are_few() -> None:
    scheduler = Scheduler(Cluster.build([(1, 1, "big"), (1, 1, "small")]), Carpool(), estimator=DeclaredEstimator())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId("a"), 1, 10.0, min_devices=1, max_devices=2))])
    assert held(scheduler) == {"a": 2}


def test_for_the_makespan_the_longest_comes_first() -> None:
    scheduler = Scheduler(ONE, Carpool(objective="makespan"))
    scheduler.handle(0.0, [JobSubmitted(job(name, work=work).spec) for name, work in (("a", 10.0), ("b", 99.0))])
    assert held(scheduler) == {"a": 0, "b": 1}


def test_of_unknown_lengths_what_ended_jobs_of_the_model_tell_counts() -> None:
    def model(name: str, model: str, at: float, work: float) -> Arrival:
        return Arrival(at, replace(job(name, work=work).spec, model=model))

    arrivals = [
        model("a", "short", 0.0, 400.0),
        model("b", "long", 400.0, 4_000.0),
        model("c", "long", 4_400.0, 4_000.0),
        model("d", "short", 4_400.0, 400.0),
    ]
    run = drive(Carpool(lengths="unknown"), ONE, arrivals, PlainWorld())
    started = [order.job for _, order in run.orders if hasattr(order, "allocation")]
    assert started.index(JobId("d")) < started.index(JobId("c"))


def test_of_a_device_that_would_slow_a_job_down_no_saving_is_told() -> None:
    scheduler = Scheduler(Cluster.build([(1, 2, "V100")]), Carpool(), estimator=ScalingWorld(exponent=-0.5).estimator())
    scheduler.handle(0.0, [JobSubmitted(JobSpec(JobId("a"), 1, 100.0, min_devices=1, max_devices=2))])
    told = scheduler.policy.details(scheduler.snapshot(), scheduler.jobs[JobId("a")])
    assert "one more would not make it faster" in told


def test_reasons_name_savings_costs_and_holders() -> None:
    scheduler = Scheduler(Cluster.build([(1, 4, "V100")]), Carpool(), estimator=ScalingWorld(exponent=0.5).estimator())
    specs = [JobSpec(JobId(name), 1, 100.0, min_devices=1, max_devices=4) for name in ("a", "b")]
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    told = scheduler.policy.details(scheduler.snapshot(), scheduler.jobs[JobId("a")])
    assert told.startswith("holds ")
    assert "one more would save it " in told, told
    gangs = Scheduler(ONE, Carpool())
    gangs.handle(0.0, [JobSubmitted(job(name, work=work).spec) for name, work in (("a", 10.0), ("b", 90.0))])
    told = gangs.policy.details(gangs.snapshot(), gangs.jobs[JobId("b")])
    assert "held by a" in told


def test_why_names_the_jobs_ahead_and_what_waiting_added() -> None:
    scheduler = Scheduler(ONE, Carpool())
    works = {"a": 10_000.0, "b": 20_000.0, "c": 90_000.0}
    scheduler.handle(0.0, [JobSubmitted(job(name, work=work).spec) for name, work in works.items()])
    policy, view = scheduler.policy, scheduler.snapshot()
    assert list(policy.start_order(view)) == ["b", "c"]
    assert "raised its weight" not in policy.why(view, scheduler.jobs[JobId("c")])
    view.at = 5e5
    assert "raised its weight" in policy.why(view, scheduler.jobs[JobId("c")])


def test_a_preempted_job_waits_for_the_one_that_took_its_place() -> None:
    scheduler = Scheduler(ONE, Carpool())
    scheduler.handle(0.0, [JobSubmitted(job("a", work=100.0).spec)])
    records: list[Record] = []
    scheduler.add_observer(type("Kept", (), {"record": lambda self, record: records.append(record)})())
    scheduler.handle(1.0, [JobSubmitted(job("b", work=10.0).spec)])
    assert records[0].planned is not None
    assert "a waits for 1 V100 held by b: " in records[0].planned.reason


@pytest.mark.parametrize(
    "text", ["carpool:lengths=long", "carpool:objective=fun", "carpool:growth=1", "carpool:trust=0.5"]
)
def test_parameters_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(CarpoolError):
        parse_policy(text)


def test_limits_that_change_are_obeyed_whatever_was_known_before() -> None:
    scheduler = Scheduler(Cluster.build([(1, 4, "V100")]), Carpool())
    elastic = JobSpec(JobId("a"), 2, 1000.0, min_devices=1, max_devices=4)
    scheduler.handle(0.0, [JobSubmitted(elastic), JobSubmitted(replace(elastic, id=JobId("b")))])
    scheduler.handle(10.0, [LimitsChanged(JobId("a"), 1, 1)])
    scheduler.check()
    assert held(scheduler)["a"] == 1


def test_a_job_of_unknown_rates_starts_narrow_and_keeps_the_width_that_measured_faster() -> None:
    cluster = Cluster.build([(1, 2, "cpu")])
    estimator = OnlineEstimator(cluster)
    scheduler = Scheduler(cluster, Carpool(), estimator=estimator)
    spec = JobSpec(JobId("mlp"), 1, 100_000.0, min_devices=1, max_devices=2)
    measured = {1: 100.0, 2: 40.0}  # steps per second: a second device slows it down
    orders, widths, at, done = scheduler.handle(0.0, [JobSubmitted(spec)]), list[int](), 0.0, 0.0
    for _ in range(12):
        for order in orders:
            if isinstance(order, Assign):
                widths.append(order.allocation.num_devices)
                scheduler.handle(at, [AssignApplied(spec.id, order.generation, done)])
        at, done = at + 15.0, done + 15.0 * measured[widths[-1]]
        generation = scheduler.jobs[spec.id].generation
        orders = scheduler.handle(at, [ProgressReported(spec.id, generation, done, measured[widths[-1]])])
        orders += scheduler.handle(at, [Woke()]) if scheduler.wake_at is not None and scheduler.wake_at <= at else []
    assert widths[0] == 1
    assert widths[-1] == 1
    assert len(widths) <= 3
