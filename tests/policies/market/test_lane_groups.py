"""Groups with shares: formed where they save completion time, measured, kept or split, and explained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.errors import InputError
from carpool.core.estimates import Estimator
from carpool.core.messages import JobFinished, Probe, ProgressReported, Record
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.market.lane_groups import Block, LanePace, Schedule, completion
from carpool.policies.market.policy import Carpool, Elastic
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace, PlainWorld
from carpool.testing import drive

STEPS_PER_S = 100.0


@dataclass(frozen=True, slots=True)
class Crowd(PlainWorld):
    """Every neighbour slows a job down by the same amount; the estimator has to find out."""

    harm: float = 0.0
    kind: str = "H200"
    beside: dict[JobId, tuple[Neighbour, ...]] = field(default_factory=dict)

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        if placement.neighbours or placement.fraction == 1.0:  # not while a probe runs
            self.beside[spec.id] = placement.neighbours
        return Pace(STEPS_PER_S / (1.0 + self.harm * len(placement.neighbours)))

    def estimator(self) -> Estimator:
        live = OnlineEstimator(Cluster.build([(1, 1, self.kind)]), {})
        live.neighbours_of = lambda job: self.beside.get(job.id, ())
        return live


def arrivals(count: int, seconds: float, **spec: object) -> list[Arrival]:
    one = JobSpec(JobId("j"), 1, seconds * STEPS_PER_S)
    return [Arrival(0.0, replace(one, id=JobId(f"j{place}"), **spec)) for place in range(count)]  # type: ignore[arg-type]


def held_at(records: list[Record], at: float) -> dict[JobId, tuple[float, ...]]:
    held: dict[JobId, tuple[float, ...]] = {}
    for record in records:
        if record.at > at:
            break
        for fact in record.facts:
            if isinstance(fact, JobFinished):
                held.pop(fact.job, None)
        for job, allocation, _ in record.planned.changes if record.planned else ():
            held.pop(job, None)
            if allocation is not None:
                held[job] = allocation.fractions
    return held


def test_jobs_that_arrive_together_start_in_one_group_on_a_gpu() -> None:
    run = drive(Carpool(), Cluster.build([(1, 1, "H200")]), arrivals(3, 200.0), Crowd(), report_every_s=0.2)
    first = held_at(run.records, 0.0)
    assert len(first) >= 2
    assert sum(share for (share,) in first.values()) >= 1.0
    assert max(record.at for record in run.records) < 1.5 * 200.0  # one after another: 600 s


class Silent(OnlineEstimator):
    """Learns nothing about jobs, as about commands that report no progress."""

    def knows_length(self, job: Job) -> bool:
        return False

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Mute(Crowd):
    def estimator(self) -> Estimator:
        return Silent(Cluster.build([(1, 1, self.kind)]), {})


def test_jobs_of_unknown_length_all_start_at_once_and_stay_together() -> None:
    run = drive(Carpool(), Cluster.build([(1, 1, "H200")]), arrivals(4, 100.0), Mute(harm=0.1))
    assert len(held_at(run.records, 0.0)) == 4
    changes = [c for r in run.records if r.at < 99.0 and r.planned for c in r.planned.changes]
    assert len(changes) == 4, "nothing is known later that was not known at the start"


def test_a_group_of_known_lengths_is_not_torn_apart_for_a_predicted_gain() -> None:
    world = Crowd(harm=0.25)
    run = drive(Carpool(), Cluster.build([(1, 1, "H200")]), arrivals(4, 8.0), world, report_every_s=0.2)
    stops = [c for r in run.records if r.planned for c in r.planned.changes if c.allocation is None]
    assert len(held_at(run.records, 0.0)) == 4
    assert not stops


def test_groups_are_probed_and_split_within_seconds_where_taking_turns_is_faster() -> None:
    run = drive(Carpool(), Cluster.build([(1, 1, "H200")]), arrivals(2, 300.0), Crowd(harm=3.0), report_every_s=0.2)
    probes = [
        c.job for r in run.records for c in (r.planned.changes if r.planned else ()) if isinstance(c.purpose, Probe)
    ]
    assert sorted(probes) == ["j0", "j1"]
    assert len(held_at(run.records, 0.0)) == 2
    assert len(held_at(run.records, 20.0)) == 1
    starts = [record.at for record in run.records if len(held_at(run.records, record.at)) > 1]
    assert max(starts) < 20.0, "the mix is not tried again"


def test_one_core_is_not_shared_and_two_cores_are_tried() -> None:
    for kind, together in (("cpu1", 1), ("cpu2", 2)):
        world = Crowd(harm=1.0, kind=kind)
        run = drive(Carpool(), Cluster.build([(1, 1, kind)]), arrivals(2, 300.0), world, report_every_s=0.2)
        assert len(held_at(run.records, 0.0)) == together


def test_jobs_that_do_not_fit_in_memory_together_run_apart() -> None:
    (node,) = Cluster.build([(1, 1, "H200")]).nodes
    cluster = Cluster((replace(node, banks=(replace(node.banks[0], memory_bytes=10 << 30),)),))
    run = drive(Carpool(), cluster, arrivals(2, 100.0, memory_bytes=6 << 30), Crowd(), report_every_s=0.2)
    assert all(len(held_at(run.records, record.at)) <= 1 for record in run.records)


@dataclass(frozen=True, slots=True)
class Uneven(Crowd):
    """The last job makes ten times the steps of the others in a second."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        rate, _ = Crowd.pace(self, spec, done, placement)
        return Pace(10.0 * rate if spec.id == "j2" else rate)


def test_a_job_that_never_ran_is_looked_at_early_and_not_kept_to_the_end() -> None:
    (node,) = Cluster.build([(1, 1, "H200")]).nodes
    cluster = Cluster((replace(node, banks=(replace(node.banks[0], memory_bytes=10 << 30),)),))
    run = drive(Carpool(), cluster, arrivals(3, 300.0, memory_bytes=6 << 30), Uneven(), report_every_s=0.2)
    ends = {fact.job: record.at for record in run.records for fact in record.facts if isinstance(fact, JobFinished)}
    assert min(ends, key=lambda job: ends[job]) == "j2", "it takes 30 s, the others 300 s"
    assert ends[JobId("j2")] < 60.0


def test_exact_jobs_share_and_keep_their_lane() -> None:
    run = drive(Carpool(), Cluster.build([(1, 1, "H200")]), arrivals(3, 100.0, exact=True), Crowd(), report_every_s=0.2)
    lanes: dict[JobId, set[tuple[float, ...]]] = {}
    for record in run.records:
        for job, allocation, _ in record.planned.changes if record.planned else ():
            if allocation is not None:
                lanes.setdefault(job, set()).add(allocation.fractions)
    assert len(held_at(run.records, 0.0)) > 1
    assert all(len(shares) == 1 for shares in lanes.values())


def test_without_sharing_nothing_is_grouped() -> None:
    run = drive(Elastic(), Cluster.build([(1, 1, "H200")]), arrivals(3, 100.0), Crowd(), report_every_s=0.2)
    assert all(len(held_at(run.records, record.at)) <= 1 for record in run.records)


seconds = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=8)


@given(seconds, st.floats(0.1, 1.0))
def test_completion_is_bounded_by_the_slowest_and_the_undisturbed_run(lengths: list[float], speed: float) -> None:
    cost, end_s = completion([1.0] * len(lengths), lengths, [LanePace(speed)] * len(lengths))
    assert sum(lengths) <= cost * (1 + 1e-6)
    assert max(lengths) <= end_s * (1 + 1e-6)
    assert end_s <= max(lengths) / speed * (1 + 1e-6)


def test_the_last_job_gets_the_whole_device_where_that_pays() -> None:
    _, end_s = completion([1.0, 1.0], [1.0, 101.0], [LanePace(0.5, 0.5, 2.0)] * 2)
    assert end_s == pytest.approx(2.0 + 2.0 + 100.0)
    _, end_s = completion([1.0, 1.0], [1.0, 2.0], [LanePace(0.5, 0.5, 2.0)] * 2)
    assert end_s == pytest.approx(2.0 + 2.0), "its share stays"


def test_small_shares_cost_what_they_hold_back_when_neighbours_have_left() -> None:
    lengths = [5.0, 10.0, 15.0, 20.0]
    small, _ = completion([1.0] * 4, lengths, [LanePace(0.41, 0.6, 2.0)] * 4)
    large, _ = completion([1.0] * 4, lengths, [LanePace(0.40, 0.9, 2.0)] * 4)
    assert large < small


def test_two_equal_jobs_save_completion_time_only_past_four_thirds() -> None:
    turns = 1.0 + 2.0
    cost, _ = completion([1.0, 1.0], [1.0, 1.0], [LanePace(0.6), LanePace(0.6)])
    assert cost > turns
    cost, _ = completion([1.0, 1.0], [1.0, 1.0], [LanePace(0.7), LanePace(0.7)])
    assert cost < turns


@given(st.integers(1, 8), st.floats(0.125, 1.0))
@example(4, 0.137)  # rounded, the rate times the time is less than the 10 s that are left
def test_open_ended_jobs_of_one_mean_gain_by_running_together_as_soon_as_they_are_faster(n: int, speed: float) -> None:
    together, _ = completion([1.0] * n, [10.0] * n, [LanePace(speed)] * n, is_open_ended=True)
    in_turn = 10.0 * n * (n + 1) / 2
    assert (together < in_turn) == (n * speed > 1.0 and n > 1) or together == pytest.approx(in_turn)


def test_a_negative_number_of_jobs_is_refused() -> None:
    with pytest.raises(InputError, match="together"):
        Carpool(together=-1)


def single(row: int, seconds: float, weight: float = 1.0) -> Block:
    return Block((row,), (1.0,), (1.0,), weight * seconds, seconds)


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(0.1, 10.0)), min_size=1, max_size=6))
def test_on_one_device_the_schedule_costs_what_smiths_rule_costs(jobs: list[tuple[float, float]]) -> None:
    weights = np.array([weight for _, weight in jobs])
    blocks = [single(row, seconds, weight) for row, (seconds, weight) in enumerate(jobs)]
    at, cost = 0.0, 0.0
    for seconds, weight in sorted(jobs, key=lambda job: job[0] / job[1]):
        at += seconds
        cost += weight * at
    none = np.zeros(0)
    assert Schedule(none, none, none, 1.0).costs([blocks], weights)[0] == pytest.approx(cost)


def list_scheduled(lengths: list[float], devices: int) -> float:
    """Σ completion time of jobs that start in this order, each on the device that is free first."""
    free, total = [0.0] * devices, 0.0
    for seconds in lengths:
        end = heappop(free) + seconds
        heappush(free, end)
        total += end
    return total


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12), st.integers(1, 5))
def test_on_several_devices_the_schedule_costs_what_list_scheduling_costs(lengths: list[float], devices: int) -> None:
    none, blocks = np.zeros(0), [single(row, seconds) for row, seconds in enumerate(lengths)]
    cost = Schedule(none, none, none, float(devices)).costs([blocks], np.ones(len(lengths)))[0]
    assert cost == pytest.approx(list_scheduled(sorted(lengths), devices))
    ends = np.array(lengths)
    others = Schedule(ends[1:], np.ones(len(ends) - 1), np.ones(len(ends) - 1), float(devices))
    assert others.costs([blocks[:1]], np.ones(1))[0] + ends[1:].sum() == pytest.approx(cost)  # the same as other jobs


def test_a_block_delays_many_merged_jobs_by_its_length_over_the_devices() -> None:
    ends = np.linspace(10.0, 100.0, 1000)
    many = Schedule(ends, np.ones(1000), np.ones(1000), 10.0)
    short, none = many.costs([[single(0, 5.0)], [single(0, 1e-6)]], np.ones(1))
    expected = list_scheduled([5.0, *ends], 10) - list_scheduled([1e-6, *ends], 10)
    assert short - none == pytest.approx(expected, rel=0.1)


def test_jobs_that_find_a_device_each_wait_for_nothing() -> None:
    none = np.zeros(0)
    blocks = [single(row, 10.0) for row in range(3)]
    assert Schedule(none, none, none, 4.0).costs([blocks], np.ones(3))[0] == pytest.approx(30.0)


def test_long_jobs_are_not_grouped_for_the_sake_of_short_ones_that_run_before_them() -> None:
    long = Block((0, 1), (1.0, 1.0), (0.6, 0.6), 2 * 1000.0 / 0.6, 1000.0 / 0.6)
    short = [single(row, 1.0) for row in range(2, 8)]
    none = np.zeros(0)
    apart, together = Schedule(none, none, none, 1.0).costs(
        [[single(0, 1000.0), single(1, 1000.0), *short], [long, *short]], np.ones(8)
    )
    assert apart < together
