"""Hare: Fig. 5 of its text, gaps, starvation, guesses, and what happens when there is no solution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.messages import JobFinished, JobSubmitted, ProgressReported, Record
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.policy import Policy
from carpool.core.topology import Cluster, Placement
from carpool.policies.hare.policy import Hare
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import PlainWorld, World
from carpool.sim.worlds.parts import Groups, PartsOracle, PartsWorld
from carpool.testing import PolicyContract
from carpool.testing.rig import Rig

WORLD = PartsWorld(
    {
        "steep": {"V100": 0.1, "K80": 0.4},
        "flat": {"V100": 0.1, "K80": 0.125},
    }
)


class Ends:
    """An observer that keeps when each job ended."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}
        self.turns: dict[str, set[int]] = {}
        self.believed: dict[tuple[str, int], float] = {}  # rate by job and turn

    def record(self, record: Record) -> None:
        self.at |= {fact.job: record.at for fact in record.facts if isinstance(fact, JobFinished)}
        planned = record.planned
        for change, rate in zip(planned.changes, planned.believed, strict=True) if planned else ():
            if change.allocation is not None:
                turn = change.allocation.shares[0].turn
                self.turns.setdefault(change.job, set()).add(turn)
                self.believed[change.job, turn] = rate


def ends(
    policy: str | Policy, jobs: Sequence[Arrival], groups: Sequence[tuple[int, int, str]], world: World = WORLD
) -> tuple[float, Ends]:
    """Weighted JCT, and what was seen."""
    arrivals, cluster = world.prepare(jobs, Cluster.build(groups))
    seen = Ends()
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    summary = simulate(arrivals, cluster, policy, world, observers=(seen,)).summary()
    assert summary.finished == len(jobs)
    return summary.weighted_jct_s, seen


def job(name: str, parts: int, work: float, model: str = "steep", weight: float = 1.0, at: float = 0.0) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), parts, work, model=model, weight=weight))


def test_figure_5() -> None:
    """Oblivious is worse than aware, and aware gangs are worse than parts that need not run at the same instant.

    The drawing is lost; the three schedules are told apart by its caption: (a) does not look at kinds, (b) does, but
    keeps a step's parts together, (c) lets them go.
    """
    jobs = [job("a", 2, 30.0, weight=3.0), job("b", 1, 30.0, "flat"), job("c", 1, 10.0, weight=4.0)]
    groups = [(1, 2, "K80"), (1, 1, "V100")]
    oblivious, aware, better = (ends(policy, jobs, groups)[0] for policy in ("sched-homo", "wsrtf", "hare"))
    assert oblivious == pytest.approx(84.7, abs=0.1)
    assert aware == pytest.approx(57.8, abs=0.1)
    assert better < 0.75 * aware


def test_figure_3() -> None:
    """With as many devices as parts, a faster one among slow ones brings nothing: the step waits for the slow."""
    spec = JobSpec(JobId("a"), 4, 1.0, model="flat")
    slow = WORLD.step(spec, ((Kind("K80"), 4),)).seconds
    assert WORLD.step(spec, ((Kind("K80"), 3), (Kind("V100"), 1))).seconds == slow


def test_weights_decide_who_goes_first() -> None:
    _, seen = ends("hare", [job("light", 1, 10.0), job("heavy", 1, 10.0, weight=2.0)], [(1, 1, "V100")])
    assert seen.at["heavy"] < seen.at["light"]


def test_width_counts_as_much_as_length() -> None:
    wide, narrow = job("wide", 4, 10.0), job("narrow", 1, 15.0)
    _, seen = ends("hare", [wide, narrow], [(1, 1, "V100")])
    assert seen.at["narrow"] == pytest.approx(15.0, abs=0.1)


def test_a_narrow_cluster_serves_a_wide_job_in_waves() -> None:
    reached, _ = ends("hare", [job("a", 8, 10.0)], [(1, 2, "V100")])
    assert reached == pytest.approx(40.0, abs=0.1)


def test_devices_that_are_far_too_slow_are_refused() -> None:
    jobs = [job("a", 1, 10.0), job("b", 1, 10.0)]
    _, seen = ends("hare", jobs, [(1, 1, "V100"), (1, 1, "K80")])
    assert max(seen.at.values()) == pytest.approx(20.0, abs=0.1)  # one waits for the V100
    _, seen = ends("hare:slower=5", jobs, [(1, 1, "V100"), (1, 1, "K80")])
    assert max(seen.at.values()) < 20.0  # it begins on the K80


def test_gaps_are_filled() -> None:
    """Two parts on the V100 end before one on the K80; a job that the K80 is too slow for runs there meanwhile."""
    world = PartsWorld({"wide": {"V100": 0.2, "K80": 0.5}, "steep": {"V100": 0.1, "K80": 0.4}})
    jobs = [job("top", 3, 20.0, "wide", weight=9.0), job("low", 1, 20.0, "steep")]
    groups = [(1, 1, "V100"), (1, 1, "K80")]
    filled, seen = ends(Hare(patience_s=1e-9), jobs, groups, world)  # in order of submission, whatever devices cost
    alone, others = ends(Hare(patience_s=1e-9, gaps=False), jobs, groups, world)
    assert 1 in seen.turns["low"]
    assert seen.believed["low", 1] == pytest.approx(0.2 - 2 * 0.004 / 0.5)  # the V100 is idle for 0.1 of 0.5 s
    assert others.turns["low"] == {0}
    assert seen.at["top"] == pytest.approx(others.at["top"])
    assert seen.at["low"] < others.at["low"]
    assert filled < alone


@dataclass(frozen=True, slots=True)
class Moving(DeclaredEstimator):
    """Says what a move costs."""

    seconds: float = 0.0

    def move_s(self, spec: JobSpec) -> float:
        return self.seconds


@pytest.mark.parametrize(("seconds", "moves"), [(0.0, True), (20.0, False)])
def test_a_job_is_not_preempted_for_less_than_a_move_costs(seconds: float, moves: bool) -> None:
    rig = Rig(Hare(), [(1, 1, "V100")], estimator=Moving(seconds=seconds))
    rig.say(0.0, JobSubmitted(JobSpec(JobId("runs"), 1, 10.0)))
    rig.answered(0.0)
    assert bool(rig.say(1.0, JobSubmitted(JobSpec(JobId("new"), 1, 10.0, weight=1.5)))) is moves


class SlowAcross(Estimator):
    """Rate 10 on one device, and 3 across device types: synchronisation takes most of a step."""

    version = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(3.0 if len(placement.groups) > 1 else 10.0)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        pass


def test_a_job_that_fits_on_no_single_type_is_valued_by_its_rate_across_types() -> None:
    rig = Rig(Hare(gaps=False), [(1, 1, "V100"), (1, 1, "K80")], estimator=SlowAcross())
    gang = JobSpec(JobId("gang"), 2, 100.0, weight=40.0, min_devices=2)
    rig.say(0.0, JobSubmitted(gang))
    rig.answered(0.0)
    assert rig.say(1.0, JobSubmitted(JobSpec(JobId("low"), 1, 20.0))) == []


@dataclass(frozen=True, slots=True)
class LateOracle(PartsOracle):
    """Knows gaps from the third question on, as if they were measured meanwhile."""

    measures_idle: ClassVar[bool] = True
    asked: list[Groups] = field(default_factory=list)

    def idle(self, spec: JobSpec, groups: Groups) -> Mapping[Kind, float]:
        self.asked.append(groups)
        return PartsOracle.idle(self, spec, groups) if len(self.asked) > 2 else {}


class LateParts(PartsWorld):
    """A world with this oracle."""

    def estimator(self) -> Estimator:
        return LateOracle(self)


def test_gaps_that_are_measured_while_a_job_waits_are_filled() -> None:
    world = LateParts({"wide": {"V100": 0.2, "K80": 0.5}, "steep": {"V100": 0.1, "K80": 0.4}})
    jobs = [job("top", 3, 20.0, "wide", weight=9.0), job("low", 1, 20.0, "steep")]
    _, seen = ends(Hare(patience_s=1e-9), jobs, [(1, 1, "V100"), (1, 1, "K80")], world)
    assert 1 in seen.turns["low"]


def stream() -> list[Arrival]:
    """A long light job, and short heavy ones that keep the device more than busy for 400 s."""
    return [job("long", 1, 20.0), *(job(f"s{i}", 1, 4.1, weight=5.0, at=4.0 * i) for i in range(100))]


def test_nobody_starves() -> None:
    _, patient = ends(Hare(patience_s=1e9), stream(), [(1, 1, "V100")])
    _, aging = ends(Hare(patience_s=60.0), stream(), [(1, 1, "V100")])
    assert patient.at["long"] > 400.0  # only after all the others
    assert aging.at["long"] <= 60.0 + 20.0 + 0.1


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 10.0), st.integers(1, 5)), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_the_wait_is_bounded(drawn: list[tuple[float, float, int]]) -> None:
    """On one device nobody ends later than patience, own length and the lengths of those submitted before."""
    patience_s, at, jobs = 7.0, 0.0, []
    for number, (gap, work, weight) in enumerate(drawn):
        at += gap
        jobs.append(job(f"j{number}", 1, work, weight=float(weight), at=at))
    _, seen = ends(Hare(patience_s=patience_s), jobs, [(1, 1, "V100")], PlainWorld())
    before_s = 0.0
    for submitted, spec in jobs:
        before_s += spec.work or 0.0
        assert seen.at[spec.id] <= submitted + patience_s + before_s + 1e-3


def test_unknown_lengths_are_not_looked_at() -> None:
    jobs = [job("long", 1, 90.0), job("short", 1, 10.0)]
    _, told = ends("hare", jobs, [(1, 1, "V100")])
    _, untold = ends("hare:lengths=unknown", jobs, [(1, 1, "V100")])
    assert told.at["short"] == pytest.approx(10.0, abs=0.1)
    assert untold.at["long"] == pytest.approx(90.0, abs=0.1)


def test_without_a_solution_the_order_is_wspt() -> None:
    jobs = [job("a", 1, 30.0, weight=2.0), job("b", 1, 10.0), job("c", 2, 12.0, weight=5.0)]
    _, seen = ends("hare:most_jobs=0", jobs, [(1, 1, "V100")])
    assert [name for name, _ in sorted(seen.at.items(), key=lambda end: end[1])] == ["c", "b", "a"]


def test_the_literal_rule_takes_what_comes_first() -> None:
    _, seen = ends("hare-literal", [job("a", 1, 10.0)], [(1, 1, "K80"), (1, 1, "V100")])
    assert seen.at["a"] == pytest.approx(40.0, abs=0.1)


def test_a_heavier_job_never_ends_later() -> None:
    finished = [
        ends("hare", [job("x", 2, 20.0, weight=weight), *stream()[1:20]], [(1, 2, "V100")])[1].at["x"]
        for weight in (1.0, 10.0, 100.0)
    ]
    assert all(lighter >= heavier for lighter, heavier in pairwise(finished))


@pytest.mark.parametrize("text", ["lengths=maybe", "intervals=1", "slower=0.5", "guess=0", "patience_s=0"])
def test_bad_parameters_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_policy(f"hare:{text}")


class TestHareWithoutLengths(PolicyContract):
    """The contract again, with guesses and short patience."""

    examples = 8

    def make_policy(self) -> Policy:
        return Hare(lengths="unknown", guess=5.0, patience_s=6.0)
