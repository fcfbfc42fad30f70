"""Gavel's policy: shares of time become turns, whatever the cluster, the estimator and the cadence."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import JobSubmitted, ProgressReported, Record
from carpool.core.metrics import Metrics
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.policy import Plan
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Placement
from carpool.policies.gavel.policy import OBJECTIVES, Gavel
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.failures import FailureEvent, ScheduledFailures
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.gavel import GavelWorld

WORLD = GavelWorld.of_table(
    {
        "v100": {"('picky', 1)": {"null": 10.0}, "('easy', 1)": {"null": 2.0}, "('easy', 2)": {"null": 4.0}},
        "k80": {"('picky', 1)": {"null": 0.0}, "('easy', 1)": {"null": 1.0}, "('easy', 2)": {"null": 2.0}},
    }
)
ONE_EACH = Cluster.build([(1, 1, "V100"), (1, 1, "K80")])


def job(name: str, model: str = "easy", work: float | None = 1000.0, devices: int = 1) -> JobSpec:
    return JobSpec(JobId(name), devices, work, model)


class Story:
    """Remembers, for each instant, which kind each changed job was given (None: taken off), and every note."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.moves: list[tuple[float, str, str | None]] = []
        self.notes: list[object] = []

    def record(self, record: Record) -> None:
        if record.planned is None:
            return
        for change in record.planned.changes:
            held = change.allocation
            kind = None if held is None else self.cluster.groups_of(held)[0][0]
            self.moves.append((record.at, change.job, kind))
        if record.planned.note is not None:
            self.notes.append(record.planned.note)

    def kinds_of(self, name: str) -> set[str | None]:
        return {kind for _, other, kind in self.moves if other == name}


def replay(
    policy: Gavel, arrivals: list[Arrival], cluster: Cluster = ONE_EACH, round_s: float = 0.0
) -> tuple[Metrics, Story]:
    story = Story(cluster)
    return simulate(arrivals, cluster, policy, WORLD, round_s=round_s, observers=[story]), story


def due(policy: Gavel, specs: list[JobSpec], cluster: Cluster = ONE_EACH) -> dict[str, dict[str, float]]:
    """The shares of time the policy decides on at instant 0."""
    scheduler = Scheduler(cluster, policy, estimator=WORLD.estimator())
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    note = scheduler.snapshot().note
    assert isinstance(note, dict)
    found: dict[str, dict[str, float]] = note["due"]
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_job_finishes(objective: str) -> None:
    arrivals = [Arrival(60.0 * i, job(f"j{i}", work=500.0 + 100 * i, devices=1 + i % 2)) for i in range(6)]
    cluster = Cluster.build([(1, 2, "V100"), (2, 2, "K80")])
    for round_s in (0.0, 360.0):
        metrics, _ = replay(Gavel(objective=objective), arrivals, cluster, round_s)
        assert metrics.summary().finished == 6


def test_two_jobs_take_turns_on_one_device() -> None:
    arrivals = [Arrival(0.0, job("a")), Arrival(0.0, job("b"))]
    metrics, story = replay(Gavel(turn_s=50.0), arrivals, Cluster.build([(1, 1, "V100")]))
    assert sorted(metrics.jct_s) == [950.0, 1000.0]  # 500 s each alone, in turns of 50 s
    assert {at for at, _, _ in story.moves} >= {0.0, 50.0, 100.0, 150.0}


def test_jobs_are_never_put_where_they_make_no_progress() -> None:
    arrivals = [Arrival(0.0, job("p", "picky")), Arrival(0.0, job("q", "picky"))]
    for policy in (Gavel(), Gavel(perf=False), Gavel(objective="throughput")):
        metrics, story = replay(policy, arrivals)
        assert metrics.summary().finished == 2
        assert story.kinds_of("p") | story.kinds_of("q") <= {"V100", None}


def test_a_job_that_can_run_nowhere_harms_nobody() -> None:
    for objective in OBJECTIVES:
        metrics, story = replay(
            Gavel(objective=objective), [Arrival(0.0, job("wide", devices=2)), Arrival(0.0, job("e"))]
        )
        assert metrics.summary().finished == 1
        assert story.kinds_of("wide") == set()
        assert due(Gavel(objective=objective), [job("wide", devices=2), job("e")]).keys() == {"e"}


def test_aware_shares_follow_the_rates_and_agnostic_ones_do_not() -> None:
    specs = [job("p", "picky"), job("e")]
    aware = due(Gavel(objective="throughput"), specs)
    assert aware["p"]["V100"] == pytest.approx(1.0, abs=1e-3)
    assert aware["e"]["K80"] == pytest.approx(1.0, abs=1e-3)
    for perf, part in ((True, 1.0), (False, 0.5)):
        assert due(Gavel(perf=perf), [job("alone")])["alone"]["V100"] == pytest.approx(part, abs=1e-3)


def test_weights_buy_time() -> None:
    light, heavy = job("light"), JobSpec(JobId("heavy"), 1, 1000.0, "easy", weight=3.0)
    shares = due(Gavel(), [light, heavy], Cluster.build([(1, 1, "V100")]))
    assert shares["heavy"]["V100"] == pytest.approx(3.0 * shares["light"]["V100"], rel=1e-4)


def test_newcomers_wait_for_the_next_solution() -> None:
    arrivals = [Arrival(5.0, job("a", work=1e5)), Arrival(10.0, job("b", work=10.0))]
    _, story = replay(Gavel(recompute_s=1920.0), arrivals)
    assert next(at for at, name, _ in story.moves if name == "b") == 5.0 + 1920.0
    _, story = replay(Gavel(), arrivals)
    assert next(at for at, name, _ in story.moves if name == "b") == 10.0


def test_a_solution_of_instant_0_is_replaced_at_once() -> None:
    arrivals = [Arrival(0.0, job("a", work=1e5)), Arrival(10.0, job("b", work=10.0))]
    _, story = replay(Gavel(recompute_s=1920.0), arrivals)
    assert next(at for at, name, _ in story.moves if name == "b") == 10.0


def test_nobody_waits_before_idle_devices() -> None:
    arrivals = [Arrival(5.0, job("a", work=10.0)), Arrival(100.0, job("b", work=10.0))]
    _, story = replay(Gavel(recompute_s=1920.0), arrivals)
    assert next(at for at, name, _ in story.moves if name == "b") == 100.0


def test_in_rounds_decisions_fall_on_rounds() -> None:
    arrivals = [Arrival(7.0 * i, job(f"j{i}")) for i in range(5)]
    _, story = replay(Gavel(), arrivals, round_s=360.0)
    assert {at % 360.0 for at, _, _ in story.moves} == {0.0}


def test_a_lost_node_leads_to_a_new_solution() -> None:
    cluster = Cluster.build([(1, 1, "V100"), (1, 1, "K80")])
    story = Story(cluster)
    failures = [ScheduledFailures([FailureEvent(100.0, "node-lost", cluster.nodes[0].name)])]
    arrivals = [Arrival(0.0, job("a")), Arrival(0.0, job("b"))]
    metrics = simulate(arrivals, cluster, Gavel(), WORLD, failures=failures, observers=[story])
    assert metrics.summary().finished == 2
    assert {kind for at, _, kind in story.moves if at > 100.0} <= {"K80", None}


def test_notes_survive_json() -> None:
    for policy in (Gavel(), Gavel(objective="ftf")):
        _, story = replay(policy, [Arrival(0.0, job("a")), Arrival(50.0, job("b")), Arrival(90.0, job("c"))])
        assert story.notes
        assert json.loads(json.dumps(story.notes)) == story.notes


def test_large_gangs_cross_nodes_when_they_must() -> None:
    cluster = Cluster.build([(2, 2, "V100")])
    ones = [Arrival(0.0, job(f"s{i}", work=200.0 + 400.0 * (i % 2))) for i in range(4)]
    metrics, _ = replay(Gavel(), [*ones, Arrival(1.0, job("pair", devices=2))], cluster)
    assert metrics.summary().finished == 5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_jobs_of_unknown_length_are_planned_for(objective: str) -> None:
    scheduler = Scheduler(ONE_EACH, Gavel(objective=objective))
    orders = scheduler.handle(3.0, [JobSubmitted(job("a", work=None)), JobSubmitted(job("b", work=None))])
    assert len(orders) == 2


@dataclass
class Disappointing(Estimator):
    """Believes 1.0 of every job, until told that some get nowhere."""

    version: int = 0
    stuck: frozenset[str] = frozenset()

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(0.0 if spec.id in self.stuck else 1.0)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        raise AssertionError("nothing is reported here")


def test_devices_of_a_job_that_seems_stuck_are_not_given_away_twice() -> None:
    estimator = Disappointing()
    scheduler = Scheduler(Cluster.build([(1, 2, "V100")]), Gavel(), estimator=estimator)
    scheduler.handle(0.0, [JobSubmitted(job("a"))])
    estimator.stuck = frozenset({"a"})
    scheduler.handle(1.0, [JobSubmitted(job("b")), JobSubmitted(job("c"))])
    scheduler.check()
    assert scheduler.num_running == 2


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = Scheduler(ONE_EACH, Gavel())
    assert Gavel().plan(scheduler.snapshot()) is Plan.NOTHING


@settings(max_examples=20)
@given(
    jobs=st.lists(
        st.tuples(st.sampled_from(["easy", "picky"]), st.integers(1, 2), st.floats(1.0, 1e4)), min_size=1, max_size=6
    ),
    objective=st.sampled_from(OBJECTIVES),
    perf=st.booleans(),
)
def test_same_view_same_plan(jobs: list[tuple[str, int, float]], objective: str, perf: bool) -> None:
    policy = Gavel(objective=objective, perf=perf)
    cluster = Cluster.build([(1, 2, "V100"), (1, 2, "K80")])
    scheduler = Scheduler(cluster, policy, estimator=WORLD.estimator())
    specs = [job(f"j{i}", model, work, devices) for i, (model, devices, work) in enumerate(jobs)]
    scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs])
    scheduler.check()
    view = scheduler.snapshot()
    view.at = 400.0
    assert policy.plan(view) == policy.plan(view)


def test_only_kinds_a_job_accepts_are_used() -> None:
    choosy = JobSpec(JobId("choosy"), 1, 100.0, "easy", kinds=(Kind("K80"),))
    _, story = replay(Gavel(objective="throughput"), [Arrival(0.0, choosy)])
    assert story.kinds_of("choosy") == {"K80"}


def test_parameters_are_checked() -> None:
    assert parse_policy("gavel:objective=ftf:perf=false:recompute_s=1920") == Gavel("ftf", False, 1920.0)
    with pytest.raises(UnknownName, match="Did you mean makespan"):
        parse_policy("gavel:objective=makspan")
    with pytest.raises(InputError, match="turn_s is 0"):
        Gavel(turn_s=0.0)


# Figures that Gavel's own simulator prints; see docs/policies/gavel.md.
@pytest.mark.parametrize(
    ("policy", "jct_s", "makespan_s"),
    [
        ("gavel-fifo", 19526.9, 72320),
        ("gavel", 14622.8, 63945),
        ("gavel:objective=throughput", 17071.7, 63937),
    ],
)
def test_published_figures_are_met(shared_data: Path, policy: str, jct_s: float, makespan_s: float) -> None:
    from carpool.sim.traces.reader import read_trace

    world = GavelWorld.load(shared_data / "gavel" / "simulation_throughputs.json")
    arrivals = read_trace(shared_data / "gavel" / "max_min_fairness.trace").arrivals
    cluster = Cluster.build([(2, 4, "V100"), (4, 4, "P100"), (3, 8, "K80")])
    summary = simulate(arrivals, cluster, parse_policy(f"{policy}:recompute_s=1920"), world, round_s=360.0).summary()
    assert summary.finished == 96
    assert summary.avg_jct_s == pytest.approx(jct_s, rel=0.03)
    assert summary.makespan_s == pytest.approx(makespan_s, rel=0.03)
