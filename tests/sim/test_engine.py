"""The loop: order at one instant, second passes, ends, and runs that would never end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from carpool.core.draft import Draft
from carpool.core.errors import CarpoolError
from carpool.core.messages import AssignApplied, JobFinished, JobSubmitted, Woke
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.policy import Cadence, Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.sim.backend import SimulatedBackend
from carpool.sim.engine import Engine
from carpool.sim.event_queue import EventQueue
from carpool.sim.failures import RandomFailures
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import PlainWorld
from carpool.testing import drive
from carpool.testing.scenarios import job

ONE = Cluster.build([(1, 1, "V100")])
FOUR = Cluster.build([(1, 4, "V100")])


@dataclass(frozen=True)
class Waker(Policy):
    """Wants to be woken every second, and gives devices only from `start` on."""

    start: float

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        if view.at >= self.start:
            draft.fill()
        return draft.finish("it is time for those who wait", wake_at=view.at + 1.0)


def test_releases_before_arrivals() -> None:
    run = drive(Fifo(), ONE, [job("a"), job("b", at=10.0)])
    assert [(record.at, [type(fact) for fact in record.facts]) for record in run.records] == [
        (0.0, [JobSubmitted]),
        (0.0, [AssignApplied]),
        (10.0, [JobFinished, JobSubmitted]),
        (10.0, [AssignApplied]),
        (20.0, [JobFinished]),
    ]


def test_no_length_gives_a_second_pass_at_the_same_instant() -> None:
    run = drive(Fifo(), ONE, [job("zero", work=0.0, at=5.0), job("a", at=5.0)])
    assert [(at, order.job) for at, order in run.orders] == [(5.0, "zero"), (5.0, "a")]
    assert run.summary.avg_jct_s == (0.0 + 10.0) / 2
    assert run.records[-1].at == 15.0


def test_arrivals_are_taken_one_by_one() -> None:
    taken = 0

    def lazily() -> Iterator[Arrival]:
        nonlocal taken
        for index in range(5):
            taken += 1
            yield job(f"j{index}", at=10.0 * index)

    timeline = EventQueue()
    scheduler = Scheduler(FOUR, Fifo())
    seen: list[tuple[float, int]] = []
    engine = Engine(
        scheduler,
        SimulatedBackend(FOUR, PlainWorld(), timeline),
        timeline,
        lazily(),
        progress=lambda at: seen.append((at, taken)),
    )
    assert taken == 1
    engine.run()
    assert seen == [(10.0 * index, min(5, index + 2)) for index in range(5)]


def test_a_policy_is_woken() -> None:
    run = drive(Waker(3.0), ONE, [job("a", work=2.0)])
    assert run.outcome("a") is Phase.FINISHED
    assert [record.at for record in run.records if list(record.facts) == [Woke()]] == [1.0, 2.0, 3.0, 4.0]
    assert run.records[-1].at == 5.0


def test_rounds() -> None:
    run = drive(_InRounds(), ONE, [job("a", work=3.0, at=1.0), job("b", work=3.0, at=2.0)])
    assert [(at, order.job) for at, order in run.orders] == [(10.0, "a"), (20.0, "b")]


class _InRounds(Fifo):
    cadence: ClassVar[Cadence] = Cadence(round_s=10.0)


def test_it_ends_when_all_are_over_though_mishaps_would_go_on() -> None:
    run = drive(Fifo(), ONE, [job("a")], failures=[RandomFailures(1, node_mtbf_s=3.0, node_repair_s=1.0)])
    assert run.outcome("a") is Phase.FINISHED


@pytest.mark.parametrize(
    "failures",
    [
        [],
        [RandomFailures(1, node_mtbf_s=5.0, node_repair_s=1.0)],
        [RandomFailures(1, job_mtbf_s=1.0)],  # draws mishaps that hit nobody
    ],
)
@pytest.mark.parametrize("policy", [Fifo(), Waker(1e9)])
def test_it_ends_though_somebody_starves(failures: list[RandomFailures], policy: Policy) -> None:
    run = drive(policy, ONE, [job("wide", 2)], failures=failures, max_records=1_000_000)
    assert list(run.scheduler.jobs) == ["wide"]


def test_it_ends_when_nothing_will_happen() -> None:
    run = drive(Fifo(), ONE, [job("a"), job("b", after=["never"])])
    assert run.outcome("a") is Phase.FINISHED
    assert run.scheduler.jobs[JobId("b")].phase is Phase.BLOCKED


def test_a_trace_out_of_order_is_refused() -> None:
    with pytest.raises(CarpoolError, match=r"job 'b' is submitted at 1\.0 s but listed after one of 5\.0 s"):
        drive(Fifo(), ONE, [Arrival(5.0, JobSpec(JobId("a"), work=1.0)), Arrival(1.0, JobSpec(JobId("b"), work=1.0))])
