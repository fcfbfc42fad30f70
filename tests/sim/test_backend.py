"""Simulated machines: standstill, co-location, epochs, reports, crashes, and orders that come late or twice."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobCrashed,
    JobFinished,
    Probe,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.sim.backend import SimulatedBackend
from carpool.sim.event_queue import EventQueue
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld, TrainingSignals, World

A, B = JobId("a"), JobId("b")
Told = list[tuple[float, Fact]]


class Floor:
    """Machines with a timeline that a test moves."""

    def __init__(self, world: World, specs: Sequence[JobSpec], *, sharing: bool = False, every: float = 0.0) -> None:
        self.timeline = EventQueue()
        cluster = Cluster.build([(1, 4, "V100")])
        self.machines = SimulatedBackend(cluster, world, self.timeline, sharing=sharing, report_every_s=every)
        for spec in specs:
            self.machines.introduce(spec)

    def order(self, at: float, *orders: Assign | Release) -> list[Fact]:
        return list(self.machines.apply(at, orders))

    def until(self, end: float) -> Told:
        told: Told = []
        while (at := self.timeline.next_at) is not None and at <= end:
            told += [(at, fact) for fact in self.timeline.happen(at)]
        return told


def assign(job: JobId, generation: int, *devices: int, fraction: float = 1.0) -> Assign:
    return Assign(job, Allocation.of(*devices, fraction=fraction), generation)


def rounded(facts: list[Fact]) -> list[Fact]:
    """Facts with their floats to six places."""
    plain: list[Fact] = []
    for fact in facts:
        values = {spot.name: getattr(fact, spot.name) for spot in fields(fact)}
        plain.append(type(fact)(**{k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}))
    return plain


def test_a_job_runs_for_its_length() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 2, 10.0)])
    assert floor.order(5.0, assign(A, 1, 0, 1)) == [AssignApplied(A, 1, 0.0)]
    assert floor.machines.busy() == [A]
    assert floor.until(99.0) == [(15.0, JobFinished(A, 1))]
    assert floor.machines.busy() == []


def test_half_the_devices_half_the_speed() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 2, 10.0, min_devices=1)])
    floor.order(0.0, assign(A, 1, 0))
    assert floor.order(10.0, assign(A, 2, 0, 1)) == [AssignApplied(A, 2, 5.0), ProgressReported(A, 2, 5.0, 1.0)]
    assert floor.until(99.0) == [(15.0, JobFinished(A, 2))]


def test_a_price_is_a_standstill() -> None:
    floor = Floor(PlainWorld(start_s=3.0, resize_s=2.0), [JobSpec(A, 1, 10.0)])
    assert floor.order(0.0, assign(A, 1, 0)) == []
    assert floor.until(5.0) == [(3.0, AssignApplied(A, 1, 0.0))]
    assert floor.order(5.0, assign(A, 2, 1)) == []
    assert floor.until(99.0) == [(7.0, AssignApplied(A, 2, 2.0)), (15.0, JobFinished(A, 2))]


def test_a_move_during_the_standstill_begins_a_new_one() -> None:
    floor = Floor(PlainWorld(start_s=3.0, resize_s=2.0), [JobSpec(A, 1, 10.0)])
    floor.order(0.0, assign(A, 1, 0))
    floor.order(2.5, assign(A, 2, 1))
    assert floor.until(99.0) == [(4.5, AssignApplied(A, 2, 0.0)), (14.5, JobFinished(A, 2))]


def test_an_order_said_twice_costs_nothing() -> None:
    floor = Floor(PlainWorld(start_s=3.0, resize_s=2.0), [JobSpec(A, 1, 10.0)])
    floor.order(0.0, assign(A, 1, 0))
    assert floor.order(1.0, assign(A, 1, 0)) == [], "its answer is on its way"
    assert floor.until(4.0) == [(3.0, AssignApplied(A, 1, 0.0))]
    assert floor.order(5.0, assign(A, 1, 0)) == [AssignApplied(A, 1, 2.0)]
    assert floor.until(99.0) == [(13.0, JobFinished(A, 1))]


def test_release_and_back() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 1, 10.0)])
    floor.order(0.0, assign(A, 1, 0))
    assert floor.order(4.0, Release(A, 2)) == [ReleaseApplied(A, 2, 4.0)]
    assert floor.order(5.0, assign(A, 1, 0)) == [], "overtaken on the way"
    assert floor.until(50.0) == []
    assert floor.order(50.0, assign(A, 3, 2)) == [AssignApplied(A, 3, 4.0)]
    assert floor.order(51.0, Release(A, 2)) == [], "overtaken as well"
    assert floor.until(99.0) == [(56.0, JobFinished(A, 3))]
    assert floor.order(60.0, assign(A, 4, 0), Release(A, 5)) == [], "the end is on its way and wins"


def test_neighbours_change_each_others_pace() -> None:
    """Two halves fit; the third half makes 1.5 of one device, so each gets two thirds of its half."""
    specs = [JobSpec(JobId(name), 1, 6.0) for name in "abc"]
    floor = Floor(PlainWorld(), specs, sharing=True)
    floor.order(0.0, assign(A, 1, 0, fraction=0.5), assign(B, 1, 0, fraction=0.5))
    third = floor.order(3.0, assign(JobId("c"), 1, 0, fraction=0.5))
    assert rounded(third) == [
        AssignApplied(JobId("c"), 1, 0.0),
        ProgressReported(A, 1, 1.5, 0.333333),
        ProgressReported(B, 1, 1.5, 0.333333),
    ]
    left = floor.order(9.0, Release(A, 2))
    assert rounded(left) == [
        ReleaseApplied(A, 2, 3.5),
        ProgressReported(B, 1, 3.5, 0.5),
        ProgressReported(JobId("c"), 1, 2.0, 0.5),
    ]
    assert [(round(at, 9), type(fact)) for at, fact in floor.until(99.0)] == [(14.0, JobFinished), (17.0, JobFinished)]


def test_those_who_stay_report_when_a_neighbour_goes() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 1, 2.0), JobSpec(B, 1, 9.0)], sharing=True)
    floor.order(0.0, assign(A, 1, 0), assign(B, 1, 0))
    told = floor.until(4.0)
    assert told == [(4.0, JobFinished(A, 1)), (4.0, ProgressReported(B, 1, 2.0, 1.0))]
    assert floor.until(99.0) == [(11.0, JobFinished(B, 1))]


@dataclass
class Switched(World):
    """A world whose every job stands still while it has a neighbour."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(0.0 if placement.neighbours else 1.0)

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        return TrainingSignals(loss=10.0 - done)

    def estimator(self) -> Estimator:
        return DeclaredEstimator()


@pytest.mark.parametrize("every", [0.0, 2.0])
def test_standing_still_is_reported_and_so_is_going_on(every: float) -> None:
    floor = Floor(Switched(), [JobSpec(A, 1, 10.0), JobSpec(B, 1, 10.0)], sharing=True, every=every)
    floor.order(0.0, assign(A, 1, 0))
    floor.until(4.0)
    assert ProgressReported(A, 1, 4.0, 0.0, 6.0) in floor.order(4.0, assign(B, 1, 0))
    told = floor.until(20.0)
    assert not [fact for _, fact in told if isinstance(fact, AssignApplied | JobFinished)]
    assert {fact.rate for _, fact in told if isinstance(fact, ProgressReported)} == ({0.0} if every else set())
    assert floor.order(20.0, Release(B, 2))[1:] == [ProgressReported(A, 1, 4.0, 1.0, 6.0)]
    assert [(at, fact) for at, fact in floor.until(99.0) if isinstance(fact, JobFinished)] == [
        (26.0, JobFinished(A, 1))
    ]


class Epochs(PlainWorld):
    """Every epoch of three units is half as fast as the one before."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        epoch = int(done // 3.0)
        return Pace(0.5**epoch, 3.0 * (epoch + 1))


def test_a_pace_holds_until_it_says() -> None:
    floor = Floor(Epochs(), [JobSpec(A, 1, 7.0)])
    floor.order(0.0, assign(A, 1, 0))
    assert floor.until(99.0) == [
        (3.0, ProgressReported(A, 1, 3.0, 0.5)),
        (9.0, ProgressReported(A, 1, 6.0, 0.25)),
        (13.0, JobFinished(A, 1)),
    ]


@given(st.floats(1e5, 1e9), st.floats(0.01, 5.0), st.sampled_from((0.0, 0.7)))
def test_far_from_zero_jobs_still_end(start: float, work: float, every: float) -> None:
    """A second after eleven days is not exactly a second; every epoch ends all the same, and once."""

    class Thirds(PlainWorld):
        def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
            ends = [work / 3, work * 2 / 3, work]
            return Pace(1.0, next((end for end in ends if end > done), work))

    floor = Floor(Thirds(), [JobSpec(A, 1, work)], every=every)
    floor.order(start, assign(A, 1, 0))
    told: Told = []
    for _ in range(40):
        if floor.timeline.next_at is None:
            break
        told = floor.until(floor.timeline.next_at)
    assert [fact for _, fact in told] == [JobFinished(A, 1)]
    assert told[0][0] == pytest.approx(start + work)


def test_reports_as_it_goes() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 1, 10.0)], every=4.0)
    floor.order(0.0, assign(A, 1, 0))
    assert floor.until(99.0) == [
        (4.0, ProgressReported(A, 1, 4.0, 1.0)),
        (8.0, ProgressReported(A, 1, 8.0, 1.0)),
        (10.0, JobFinished(A, 1)),
    ]


def test_no_length_ends_at_once_but_not_in_the_same_breath() -> None:
    floor = Floor(PlainWorld(), [JobSpec(A, 1, 0.0)])
    assert floor.order(3.0, assign(A, 1, 0)) == [AssignApplied(A, 1, 0.0)]
    assert floor.until(3.0) == [(3.0, JobFinished(A, 1))]


def test_a_crash_goes_back_to_the_checkpoint() -> None:
    floor = Floor(PlainWorld(checkpoint_every=3.0), [JobSpec(A, 1, 10.0)])
    assert floor.machines.crash(0.0, A, "?") is None, "it does not run"
    floor.order(0.0, assign(A, 1, 0))
    assert floor.machines.crash(5.0, A, "bang") == JobCrashed(A, 1, 3.0, "bang")
    assert floor.until(99.0) == []
    assert floor.order(6.0, Release(A, 2)) == [ReleaseApplied(A, 2, 3.0)]
    assert floor.order(6.0, assign(A, 3, 0)) == [AssignApplied(A, 3, 3.0)]
    assert floor.until(99.0) == [(13.0, JobFinished(A, 3))]


def test_lost_devices_take_their_jobs_back() -> None:
    floor = Floor(PlainWorld(checkpoint_every=3.0), [JobSpec(A, 2, 10.0), JobSpec(B, 1, 10.0)])
    floor.order(0.0, assign(A, 1, 0, 1), assign(B, 1, 2))
    floor.machines.roll_back(5.0, range(1, 2))
    assert floor.until(99.0) == [(10.0, JobFinished(B, 1))], "nothing happens on devices that are gone"
    assert floor.order(20.0, Release(A, 2)) == [ReleaseApplied(A, 2, 3.0)]


def test_the_plain_world_needs_lengths() -> None:
    with pytest.raises(InputError, match="job 'a' has no length"):
        PlainWorld().prepare([Arrival(0.0, JobSpec(A))], Cluster.build([(1, 1, "V100")]))


def test_plain_pace() -> None:
    spec = JobSpec(A, 4, 1.0)
    groups = ((Kind("V100"), 2),)
    beside = (Neighbour(JobSpec(B), 0.5), Neighbour(JobSpec(B), 0.5))
    assert PlainWorld().pace(spec, 0.0, Placement(groups)).rate == 0.5
    assert PlainWorld().pace(spec, 0.0, Placement(groups, 0.5)).rate == 0.25
    assert PlainWorld().pace(spec, 0.0, Placement(groups, 0.5, neighbours=beside[:1])).rate == 0.25
    assert PlainWorld().pace(spec, 0.0, Placement(groups, 0.5, neighbours=beside)).rate == pytest.approx(0.5 / 3)


def test_a_probe_measures_a_running_job_without_a_standstill() -> None:
    floor = Floor(_SlowToChange(), [JobSpec(A, 1, 1000.0), JobSpec(B, 1, 1000.0)], sharing=True)
    floor.order(0.0, assign(A, 1, 0, fraction=0.5), assign(B, 1, 0, fraction=0.5))
    floor.until(10.0)
    probe = Assign(A, Allocation.of(0, fraction=0.5), 2, Probe(10))
    facts = floor.order(10.0, probe)
    assert [fact.generation for fact in facts if isinstance(fact, AssignApplied)] == [2]
    assert [fact.rate for fact in facts if isinstance(fact, ProgressReported) and fact.alone] == [1.0]
    ends = [at for at, fact in floor.until(3000.0) if isinstance(fact, JobFinished)]
    assert ends == pytest.approx([2005.0, 2005.0])


class _SlowToChange(PlainWorld):
    """Every change takes five seconds; a neighbour halves the rate."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(0.5 if placement.neighbours else 1.0)

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        return 5.0
