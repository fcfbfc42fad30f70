"""An executor outlives whoever started it: jobs stand still at a boundary, and the next caller goes on with them."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from carpool.core.messages import Assign, AssignApplied, JobFinished, ProgressReported, Release, ReleaseApplied
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.compat.process_lifetime import ProcessHandle
from carpool.runtime.executor.client import Claim, ClaimRefused, ExecutorClient, ExecutorOptions, ExecutorSocket
from carpool.runtime.executor.client_protocol import HeldJobStatus
from carpool.runtime.executor.reports import Facts, Gone, Outcome, Report
from carpool.runtime.worker.entry_loader import load_training
from carpool.testing.reference import plain_loop
from tests.support.daemon_crash import SLOW_TRAINING

T = TypeVar("T")
F = TypeVar("F", AssignApplied, ReleaseApplied, ProgressReported, JobFinished)
PATIENCE_S = 60.0
DEVICES = (LocalDevice(0, "cpu:0", "cpu1", cores=(min(os.sched_getaffinity(0)),)),)

ENTRY = SLOW_TRAINING


class Caller:
    """One who claims the executor behind a door, and what it has heard of it."""

    def __init__(self, link: ExecutorClient) -> None:
        self.link = link
        self.numbers: list[int] = []
        self.reports: list[Report] = []

    async def until(self, found: Callable[[], T | None]) -> T:
        async with asyncio.timeout(PATIENCE_S):
            while (thing := found()) is None:
                report = await self.link.receive()
                assert not isinstance(report, Gone), (report, self.reports)
                self.reports.append(report)
                self.numbers.append(self.link.heard)
        return thing

    def facts(self, job: JobId, kind: type[F]) -> list[F]:
        every = [fact for report in self.reports if isinstance(report, Facts) for fact in report.facts]
        return [fact for fact in every if isinstance(fact, kind) and fact.job == job]

    async def first(self, job: JobId, kind: type[F]) -> F:
        return await self.until(lambda: next(iter(self.facts(job, kind)), None))

    async def step(self, job: JobId, step: int) -> None:
        await self.until(lambda: any(fact.done >= step for fact in self.facts(job, ProgressReported)) or None)

    async def finished(self, job: JobId) -> Outcome:
        await self.first(job, JobFinished)
        return next(report for report in self.reports if isinstance(report, Outcome) and report.job == job)

    def die(self) -> None:
        """Break the line without a word, as a crash does."""
        self.link._writer.transport.abort()
        self.link._writer.close()
        self.link._process.close()


class Place:
    """A folder with an executor in it, which is claimed again and again."""

    def __init__(self, folder: Path, **options: Any) -> None:
        (folder / "jobs.py").write_text(ENTRY, encoding="utf-8")
        self.folder = folder
        self.door = ExecutorSocket(folder / "door")
        self.epoch = 0
        self.known = 0  # the last report that is kept
        chosen = {"on_orphan": "wait", "orphan_s": 30.0, "mirror_s": 0.2, "grace_s": 0.5, "tick_s": 0.02, **options}
        self._options = ExecutorOptions(**chosen)

    async def start(self) -> Caller:
        end, self.process = self.door.start_executor({})
        return Caller(await ExecutorClient.claim(end, self._claim(self.epoch + 1), self.process))

    async def claim(self, epoch: int | None = None, silence_s: float = 0.0) -> Caller:
        end = self.door.connect()
        assert end is not None
        return Caller(await ExecutorClient.claim(end, self._claim(epoch or self.epoch + 1, silence_s)))

    def _claim(self, epoch: int, silence_s: float = 0.0) -> Claim:
        self.epoch = max(epoch, self.epoch)
        return Claim(DEVICES, self.folder / "state", self._options, epoch, 1, self.known, silence_s)

    async def when(self, found: Callable[[Mapping[JobId, HeldJobStatus]], bool]) -> Caller:
        """Claim it until it stands as it should; each time without a word."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                caller = await self.claim()
                if found(caller.link.inventory.jobs):
                    return caller
                caller.die()
                await asyncio.sleep(0.02)

    def program(self, **args: Any) -> Program:
        return Program("jobs.py:tiny", args, folder=str(self.folder))

    def begin(self, caller: Caller, job: JobId, **args: Any) -> None:
        caller.link.introduce(job, self.program(**args))
        caller.link.carry([Assign(job, Allocation.of(0), 1)])

    def expected(self, **args: Any) -> str:
        return plain_loop(load_training("jobs.py:tiny", args, folder=self.folder)).digest

    def checkpoints(self, job: JobId) -> set[int]:
        found = (self.folder / "state" / "jobs" / job / "checkpoints").glob("step-*.ckpt")
        return {int(path.stem.partition("-")[2]) for path in found}


@pytest.fixture(scope="module")
def place(loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One executor for all tests that do not end it; each uses jobs of its own."""
    deep = tmp_path_factory.mktemp("claiming") / ("a" * 60) / ("b" * 60)  # a socket's name has room for 108 bytes
    deep.mkdir(parents=True)
    made = Place(deep)
    first = loop.run_until_complete(made.start())
    first.die()
    yield made

    async def end() -> None:
        caller = await made.claim()
        await caller.link.stop(checkpoint=False)
        while not isinstance(await caller.link.receive(), Gone):
            pass
        assert made.door.connect() is None
        made.process.wait()

    loop.run_until_complete(end())


def test_one_that_is_silent_is_ended_and_one_that_works_at_a_long_step_is_not(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    async def go() -> None:
        job = JobId("slow")
        place = Place(tmp_path)
        (await place.start()).die()
        caller = await place.claim(silence_s=3.0)
        caller.link.proceed()
        place.begin(caller, job, steps=1, step_s=5.0)
        await caller.finished(job)
        os.kill(caller.link.pid, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):
            assert await caller.link.receive() == Gone("it sent no heartbeat for 3 s and was killed")
        place.process.wait()
        assert place.door.connect() is None

    loop.run_until_complete(go())


def test_a_job_stands_still_without_a_caller_and_goes_on_with_the_next(
    place: Place, loop: asyncio.AbstractEventLoop
) -> None:
    async def go() -> None:
        job = JobId("a")
        first = await place.claim()
        first.link.proceed()
        place.begin(first, job, steps=60)
        await first.step(job, 5)
        place.known = next(n for n, said in zip(first.numbers, first.reports, strict=True) if isinstance(said, Facts))
        first.link.acknowledge(place.known)
        first.die()
        second = await place.when(
            lambda jobs: jobs[job].is_still and max(place.checkpoints(job), default=0) == jobs[job].steps
        )
        stood = second.link.inventory.jobs[job]
        assert (stood.generation, stood.is_over) == (1, False)
        assert 5 <= stood.steps < 60
        second.link.carry([Assign(job, Allocation.of(0), 1)])  # a second time it changes nothing
        again = await place.claim()
        second.die()
        assert again.link.inventory.jobs[job] == stood, "no step was made before anybody said so"
        again.link.proceed()
        outcome = await again.finished(job)
        assert (outcome.digest, outcome.steps) == (place.expected(steps=60), 60)
        numbers = range(place.known + 1, place.known + 1 + len(again.numbers))
        assert again.numbers == list(numbers), "all that was not kept was said again, once"
        assert again.facts(job, AssignApplied) == [] or again.facts(job, AssignApplied)[0].done == 0.0
        done = [fact.done for fact in again.facts(job, ProgressReported)]
        assert done == sorted(done)
        place.known = again.link.heard
        again.die()

    loop.run_until_complete(go())


def test_who_comes_with_an_older_epoch_is_refused_and_a_newer_one_cuts_the_line(
    place: Place, loop: asyncio.AbstractEventLoop
) -> None:
    async def go() -> None:
        job = JobId("late")
        first = await place.claim()
        with pytest.raises(ClaimRefused) as refused:
            await place.claim(place.epoch)
        assert refused.value.epoch == place.epoch
        second = await place.claim()
        async with asyncio.timeout(PATIENCE_S):
            assert await first.link._next() is None, "its line is cut"
        first.link.introduce(job, place.program())
        third = await place.claim()
        assert job not in third.link.inventory.jobs, "the first one's word counts no longer"
        assert await second.link._next() is None
        for caller in (first, second, third):
            caller.die()

    loop.run_until_complete(go())


def test_only_its_owner_can_reach_it(place: Place) -> None:
    assert stat.S_IMODE((place.folder / "door").stat().st_mode) == 0o700
    assert stat.S_IMODE((place.folder / "door" / "executor").stat().st_mode) == 0o600


def test_handed_over_jobs_go_on_meanwhile_and_are_let_go_when_forgotten(
    place: Place, loop: asyncio.AbstractEventLoop
) -> None:
    async def go() -> None:
        short, endless = JobId("short"), JobId("endless")
        first = await place.claim()
        first.link.proceed()
        place.begin(first, short, steps=30)
        place.begin(first, endless, steps=10**6)
        await first.step(short, 1)
        await first.link.leave()
        await loop.run_in_executor(None, wait_for_log, place.folder / "state" / "jobs" / short / "log", "step 30")
        second = await place.claim()
        assert (await second.finished(short)).digest == place.expected(steps=30)
        second.link.forget(short)
        second.link.forget(endless)
        second.die()
        last = await place.when(lambda jobs: short not in jobs and endless not in jobs)
        last.die()

    loop.run_until_complete(go())


def wait_for_log(path: Path, words: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while words not in path.read_text(encoding="utf-8"):
        assert time.monotonic() < until, f"{path} does not say {words!r}"
        time.sleep(0.01)


def test_nobody_comes_and_it_ends_with_everything_on_disk(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    async def go() -> None:
        running, parked = JobId("running"), JobId("parked")
        place = Place(tmp_path, orphan_s=0.3)
        caller = await place.start()
        executor = ProcessHandle(caller.link.pid)
        caller.link.proceed()
        for job in (running, parked):
            place.begin(caller, job, steps=10**6)
            await caller.step(job, 1)
        caller.link.carry([Release(parked, 2)])
        released = await caller.first(parked, ReleaseApplied)  # its state is in a mirror, and nowhere else
        assert place.checkpoints(parked) == set()
        caller.die()
        await executor.wait(PATIENCE_S)
        place.process.wait()
        assert place.checkpoints(parked) == {int(released.done)}
        assert place.checkpoints(running)

    loop.run_until_complete(go())
