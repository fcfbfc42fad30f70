"""Order of arrival on the fastest kind with room."""

import json

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import JobSubmitted, Record
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.gavel.fifo import GavelFifo, leftover_kinds
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.gavel import GavelWorld

WORLD = GavelWorld.of_table(
    {
        "v100": {"('picky', 1)": {"null": 10.0}, "('easy', 1)": {"null": 2.0}, "('easy', 2)": {"null": 4.0}},
        "p100": {"('picky', 1)": {"null": 0.0}, "('easy', 1)": {"null": 1.0}, "('easy', 2)": {"null": 2.0}},
    }
)
ONE_EACH = Cluster.build([(1, 1, "P100"), (1, 1, "V100")])


def job(name: str, work: float = 100.0, devices: int = 1, model: str = "easy") -> JobSpec:
    return JobSpec(JobId(name), devices, work, model)


class Moves:
    """(instant, job, kind) of every change; None where the job was taken off."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.list: list[tuple[float, str, str | None]] = []
        self.notes: list[object] = []

    def record(self, record: Record) -> None:
        if record.planned is not None:
            self.notes.append(record.planned.note)
            for change in record.planned.changes:
                held = change.allocation
                kind = None if held is None else self.cluster.groups_of(held)[0][0]
                self.list.append((record.at, change.job, kind))


def moves(policy: GavelFifo, arrivals: list[Arrival], cluster: Cluster = ONE_EACH, round_s: float = 0.0) -> Moves:
    seen = Moves(cluster)
    metrics = simulate(arrivals, cluster, policy, WORLD, round_s=round_s, observers=[seen])
    assert metrics.summary().finished == len(arrivals)
    return seen


def test_the_first_takes_the_fastest_kind_and_the_next_what_is_left() -> None:
    found = moves(GavelFifo(), [Arrival(0.0, job("a")), Arrival(0.0, job("b")), Arrival(0.0, job("c"))])
    assert found.list[:2] == [(0.0, "a", "V100"), (0.0, "b", "P100")]


def test_jobs_move_up_when_a_faster_kind_becomes_free() -> None:
    arrivals = [Arrival(0.0, job("a")), Arrival(0.0, job("b"))]
    assert moves(GavelFifo(), arrivals).list[2:] == [(50.0, "b", "V100")]
    assert moves(GavelFifo(replan=False), arrivals).list[2:] == []


def test_the_first_that_fits_nowhere_blocks() -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    arrivals = [Arrival(0.0, job("a")), Arrival(1.0, job("wide", devices=2)), Arrival(2.0, job("c", work=1.0))]
    for policy in (GavelFifo(), GavelFifo(replan=False)):
        starts = [name for _, name, kind in moves(policy, arrivals, cluster).list if kind is not None]
        assert starts == ["a", "wide", "c"]


def test_a_job_without_progress_on_what_is_free_is_passed_over() -> None:
    arrivals = [Arrival(0.0, job("a")), Arrival(0.0, job("p", model="picky")), Arrival(0.0, job("b", work=10.0))]
    for policy in (GavelFifo(), GavelFifo(replan=False)):
        found = moves(policy, arrivals)
        assert found.list[:2] == [(0.0, "a", "V100"), (0.0, "b", "P100")]
        assert {kind for _, name, kind in found.list if name == "p"} == {"V100"}


def test_newcomers_wait_for_the_next_decision() -> None:
    arrivals = [Arrival(5.0, job("a", work=1e4)), Arrival(400.0, job("b", work=1.0))]
    for round_s, start in ((0.0, 1925.0), (360.0, 360.0 + 2160.0)):
        found = moves(GavelFifo(recompute_s=1920.0), arrivals, round_s=round_s)
        assert next(at for at, name, _ in found.list if name == "b") == start


def test_no_order_is_given_without_a_change() -> None:
    scheduler = Scheduler(ONE_EACH, GavelFifo(), estimator=WORLD.estimator())
    scheduler.handle(0.0, [JobSubmitted(job("a", work=1e6))])
    held = scheduler.snapshot().jobs[JobId("a")].desired
    assert scheduler.handle(1.0, [JobSubmitted(job("b", work=1e6))])
    assert scheduler.handle(2.0, [JobSubmitted(job("c"))]) == []
    assert scheduler.snapshot().jobs[JobId("a")].desired == held


def test_the_listed_fifo_overbooks_the_last_kind_by_name_and_lets_jobs_take_turns() -> None:
    # a and b are both given V100, the last kind by name: b asks for 2 where 1 is left, because P100 has room for it.
    cluster = Cluster.build([(1, 2, "P100"), (1, 2, "V100")])
    arrivals = [Arrival(0.0, job("a", work=400.0)), Arrival(0.0, job("b", work=800.0, devices=2))]
    found = moves(GavelFifo(perf=False, turn_s=50.0), arrivals, cluster)
    assert {kind for _, _, kind in found.list} == {"V100", None}
    assert [at for at, name, kind in found.list if name == "b" and kind] == [50.0, 150.0, 250.0, 350.0]
    assert json.loads(json.dumps(found.notes)) == found.notes


def test_the_listed_fifo_hands_a_kind_on_to_the_head_of_the_queue() -> None:
    scheduler = Scheduler(ONE_EACH, GavelFifo(perf=False), estimator=WORLD.estimator())
    scheduler.handle(0.0, [JobSubmitted(job(name)) for name in "abc"])
    jobs = sorted(scheduler.jobs.values(), key=lambda job: job.seq)
    flat = {ONE_EACH.kinds[0]: 1.0, ONE_EACH.kinds[1]: 1.0}
    room = {ONE_EACH.kinds[0]: 3, ONE_EACH.kinds[1]: 1}  # P100 and V100
    kinds, memory = leftover_kinds([(job, flat) for job in jobs[:2]], room, {}, 0)
    assert kinds == {"a": "V100", "b": "P100"}
    kinds, memory = leftover_kinds([(job, flat) for job in jobs[1:]], room, memory, 0)
    assert kinds == {"b": "P100", "c": "V100"}
    assert memory["draws"] == [2, 1]


def test_a_turn_must_take_time() -> None:
    with pytest.raises(InputError, match="turn_s"):
        GavelFifo(turn_s=-1.0)
