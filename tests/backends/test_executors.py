"""Orders reach the executors that own the devices; a lost executor takes only its own jobs along."""

import asyncio
from contextlib import closing
from pathlib import Path

from carpool.backends.executors import ExecutorGroup
from carpool.core.journal import Header
from carpool.core.messages import Assign, Fact, NodeJoined, NodeLost
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, NodeId, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.jobs.job_file import ListedJob
from carpool.jobs.program import Program
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.runtime.executor.reports import Outcome
from carpool.service.daemon.group_commit import commit_inline
from carpool.service.daemon.loop import DaemonLoop, LoopHooks, LoopOptions
from carpool.service.store.store import Store
from tests.support.fake_executor import FakeExecutor

A, B = JobId("a"), JobId("b")
CLUSTER = Cluster.build([(2, 1, "cpu")])  # n0 has device 0, n1 has device 1
PROGRAM = Program(entry="train.py:main")


def owner(device: DeviceId) -> str:
    return f"n{device}"


def test_an_order_for_a_job_without_a_program_is_dropped() -> None:
    machine = FakeExecutor({"a": 5})
    ExecutorGroup({"n0": machine, "n1": FakeExecutor({})}, owner).carry([Assign(A, Allocation.of(0), 1)], {})
    assert machine.orders == []


class SharedClock(FakeExecutor):
    """An executor whose virtual time is that of another one."""

    def __init__(self, steps: dict[str, int], other: FakeExecutor) -> None:
        super().__init__(steps)
        other.at(6.0, lambda: self.finish_all(6.0))

    def finish_all(self, at: float) -> None:
        self._at = at
        for job in list(self._running):
            self._finish(job)


def test_a_lost_executor_takes_only_its_own_jobs_along(tmp_path: Path) -> None:
    async def main() -> None:
        steps = {"a": 10, "b": 10}
        first = FakeExecutor(steps)
        second = SharedClock(steps, first)
        renewed = FakeExecutor(steps, start=3.0, kept=first.kept)
        renewed.life = 2
        with closing(Store.open(tmp_path, Header("1", "fifo", CLUSTER))) as store:
            scheduler = Scheduler(CLUSTER, Fifo(), observers=(store,))
            group = ExecutorGroup({"n0": first, "n1": second}, owner)

            async def renew(name: str, reason: str) -> tuple[FakeExecutor, list[Fact]]:
                assert name == "n0"
                return renewed, [NodeLost(NodeId(0)), NodeJoined("n0")]

            loop = DaemonLoop(scheduler, store, group, first, LoopHooks(renew=renew), LoopOptions(commit=commit_inline))
            first.at(2.0, first.report_progress)
            first.at(3.0, first.die)
            first.at(7.0, loop.stop)
            jobs = [ListedJob(JobSpec(job), PROGRAM) for job in (A, B)]
            await loop.run((), jobs)
            assert [order.job for order in first.orders] == ["a"]
            assert [order.job for order in second.orders] == ["b"], "it is neither released nor assigned again"
            assert [order.job for order in renewed.orders if isinstance(order, Assign)] == ["a"]
            assert renewed.introduced == {"a": True}
            assert scheduler.outcome(B) is Phase.FINISHED
            marks = [entry.mark for entry in store.entries() if entry.mark.executors]
            assert {mark.executors["n0"].life for mark in marks if "n0" in mark.executors} == {1, 2}
            of_second = [mark.executors["n1"] for mark in marks if "n1" in mark.executors]
            assert {mark.life for mark in of_second} == {1}
            assert of_second[-1].heard == second.acknowledged > 0

    asyncio.run(main())


def test_a_report_that_is_held_back_is_not_marked_as_stored_by_another_executors_record(tmp_path: Path) -> None:
    async def main() -> None:
        steps = {"a": 10, "b": 10}
        first = FakeExecutor(steps)
        second = SharedClock(steps, first)
        with closing(Store.open(tmp_path, Header("1", "fifo", CLUSTER))) as store:
            scheduler = Scheduler(CLUSTER, Fifo(), observers=(store,))
            group = ExecutorGroup({"n0": first, "n1": second}, owner)
            loop = DaemonLoop(scheduler, store, group, first, options=LoopOptions(commit=commit_inline))
            first.at(1.0, lambda: first.say(Outcome(A, 10, 1, 0.5)))  # the fact that the job ended is to follow
            first.at(2.0, second.report_progress)
            first.at(3.0, loop.stop)
            await loop.run((), [ListedJob(JobSpec(job), PROGRAM) for job in (A, B)])
            of_second = [entry for entry in store.entries() if entry.record.at == 2.0 and entry.record.facts]
            assert of_second
            assert all("n0" not in entry.mark.executors for entry in of_second)

    asyncio.run(main())
