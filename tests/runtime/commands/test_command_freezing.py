"""Commands of an executor whose lease has ended stand still, whatever else stops or starts them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from carpool.core.messages import Assign, AssignApplied, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import ExecutorOptions
from carpool.runtime.executor.executor import Executor
from carpool.runtime.executor.reports import Facts, Report
from carpool.runtime.process.process_tree import descendants
from tests.runtime.executor.test_executor import DEVICES, FakePool

JOB = JobId("counts")
SCRIPT = "echo $$ > pid.new; mv pid.new pid; while true; do :; done"
PATIENCE_S = 60.0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Rig:
    """An executor with one command, and its reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[Report] = []
        options = ExecutorOptions(grace_s=0.5)
        self.executor = Executor(DEVICES, folder / "state", options, self.reports.append, FakePool().dependencies())
        program = Program(command=("sh", "-c", SCRIPT), folder=str(folder))
        self.executor.add_job(JOB, program, resume=False)

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    @property
    def is_stopped(self) -> bool:
        return state_of(self.pid) == "T"

    def has_applied(self, generation: int) -> bool:
        facts = [fact for report in self.reports if isinstance(report, Facts) for fact in report.facts]
        applied = [fact for fact in facts if isinstance(fact, AssignApplied | ReleaseApplied)]
        return any(fact.generation == generation for fact in applied)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.executor.tick()
                await asyncio.sleep(0.005)

    async def run(self) -> None:
        self.executor.apply_orders([Assign(JOB, Allocation.of(0), 1)])
        await self.until((self.folder / "pid").exists)

    async def end(self) -> None:
        self.executor.remove_job(JOB)
        await self.until(lambda: JOB not in self.executor.jobs)


def test_a_parked_command_stays_stopped_when_the_lease_is_renewed(tmp_path: Path) -> None:
    async def play() -> None:
        rig = Rig(tmp_path)
        await rig.run()
        rig.executor.apply_orders([Release(JOB, 2)])
        await rig.until(lambda: rig.has_applied(2))
        rig.executor.freeze(frozen=True)
        rig.executor.freeze(frozen=False)
        rig.executor.tick()
        assert rig.is_stopped
        rig.executor.apply_orders([Assign(JOB, Allocation.of(1), 3)])
        await rig.until(lambda: not rig.is_stopped)
        await rig.end()

    asyncio.run(play())


def test_a_command_that_is_restored_under_an_ended_lease_stops_and_goes_on_with_a_new_one(tmp_path: Path) -> None:
    async def play() -> None:
        rig = Rig(tmp_path)
        await rig.run()
        rig.executor.apply_orders([Release(JOB, 2)])
        await rig.until(lambda: rig.has_applied(2))
        rig.executor.freeze(frozen=True)
        rig.executor.apply_orders([Assign(JOB, Allocation.of(1), 3)])
        await rig.until(lambda: rig.has_applied(3))
        await rig.until(lambda: rig.is_stopped)
        rig.executor.freeze(frozen=False)
        await rig.until(lambda: not rig.is_stopped)
        await rig.end()

    asyncio.run(play())


def test_a_command_that_starts_under_an_ended_lease_stops_and_can_be_ended(tmp_path: Path) -> None:
    async def play() -> None:
        rig = Rig(tmp_path)
        rig.executor.freeze(frozen=True)
        rig.executor.apply_orders([Assign(JOB, Allocation.of(0), 1)])
        await rig.until(lambda: "T" in map(state_of, descendants(os.getpid())))
        await rig.end()

    asyncio.run(play())
