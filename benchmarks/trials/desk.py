"""Drives an executor from a benchmark: sends orders, receives reports, checks what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobFailed,
    JobFinished,
    ProgressReported,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.client import ExecutorClient, ExecutorOptions
from carpool.runtime.executor.reports import Facts, Gone, Outcome, Report, Told

T = TypeVar("T")
F = TypeVar("F", bound=Fact)
MARK = "CARPOOL_BENCHMARK"  # in the environment of every process that belongs to a benchmark
_SETTLE_S = 20.0  # for processes whose parent has just ended


class JobEnded(Exception):
    """A job was over before what was waited for came about."""


class Desk:
    """An executor, and everything it has reported. Several tasks may wait at once."""

    def __init__(self, link: ExecutorClient, mark: str, patience_s: float) -> None:
        self.link = link
        self.mark = mark
        self.patience_s = patience_s
        self.facts: list[Fact] = []
        self.outcomes: dict[str, Outcome] = {}
        self.stories: dict[str, list[str]] = {}
        self.gone = ""
        self._generations: dict[str, int] = {}
        self._news = asyncio.Condition()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def open(
        cls,
        state: Path,
        cores_of_devices: Sequence[int],
        *,
        mark: str,
        patience_s: float = 180.0,
        others: Sequence[Sequence[int]] = (),
        apart: Sequence[int] = (),
        **options: Any,
    ) -> Desk:
        """Start an executor for devices with so many cores; ``others`` lie on the same cores once more."""
        groups = [dealt(sizes, apart) for sizes in (cores_of_devices, *others)]
        devices = [
            replace(device, id=place, name=f"cpu:{place}")
            for place, device in enumerate(device for group in groups for device in group)
        ]
        chosen = ExecutorOptions(environment={MARK: mark}, **options)
        return cls(await ExecutorClient.start(devices, state, options=chosen), mark, patience_s)

    # -- orders -------------------------------------------------------------------------------------------------------

    def introduce(self, job: str, program: Program) -> None:
        """Make a job known."""
        self.link.introduce(JobId(job), program)

    def assign(self, job: str, *devices: int, fraction: float = 1.0, turn: int = 0, parts: tuple[int, ...] = ()) -> int:
        """Give a job devices; the generation of the order. ``parts`` are samples for each, else by their speed."""
        return self._carry(job, Allocation.of(*devices, fraction=fraction, turn=turn)._replace(parts=parts))

    def release(self, job: str) -> int:
        """Take a job off its devices; the generation of the order."""
        return self._carry(job, None)

    def _carry(self, job: str, allocation: Allocation | None) -> int:
        number = self._generations[job] = self._generations.get(job, 0) + 1
        order = Release(JobId(job), number) if allocation is None else Assign(JobId(job), allocation, number)
        self.link.carry([order])
        return number

    # -- reports ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while not self.gone:
            self._take(await self.link.receive())
            async with self._news:
                self._news.notify_all()

    def _take(self, report: Report) -> None:
        match report:
            case Facts(facts=facts):
                self.facts += facts
            case Told(job=job, words=words):
                self.stories.setdefault(job, []).append(words)
            case Outcome(job=job):
                self.outcomes[job] = report
            case Gone(reason=reason):
                self.gone = reason

    def of(self, job: str, kind: type[F]) -> list[F]:
        """A job's facts of one kind, oldest first."""
        return [fact for fact in self.facts if isinstance(fact, kind) and getattr(fact, "job", None) == job]

    async def until(self, found: Callable[[], T | None]) -> T:
        """Wait until something is there; not for ever, and not when the executor is gone."""
        async with asyncio.timeout(self.patience_s), self._news:
            while (thing := found()) is None:
                if self.gone:
                    raise RuntimeError(f"the executor has gone: {self.gone}")
                await self._news.wait()
        return thing

    async def answered(self, job: str, generation: int) -> AssignApplied | ReleaseApplied:
        """Wait for the answer to an order."""

        def answer() -> AssignApplied | ReleaseApplied | None:
            answers: list[AssignApplied | ReleaseApplied] = [
                *self.of(job, AssignApplied),
                *self.of(job, ReleaseApplied),
            ]
            found = next((fact for fact in answers if fact.generation == generation), None)
            if found is None:
                self._raise_if_over(job)
            return found

        return await self.until(answer)

    async def step(self, job: str, step: float) -> float:
        """Wait until a job is known to have made so many steps; the steps it has made."""

        def made() -> float | None:
            done = max((fact.done for fact in self.of(job, ProgressReported)), default=0.0)
            if done >= step:
                return done
            self._raise_if_over(job)
            return None

        return await self.until(made)

    def _raise_if_over(self, job: str) -> None:
        if self._end(job) is not None:
            raise JobEnded(job)

    def _end(self, job: str) -> JobFinished | JobFailed | None:
        ends = (fact for fact in self.facts if isinstance(fact, JobFinished | JobFailed) and fact.job == job)
        return next(ends, None)

    async def end_of(self, job: str) -> str:
        """Wait for a job's end: its digest, or why it failed."""
        ended = await self.until(lambda: self._end(job))
        if isinstance(ended, JobFailed):
            return f"FAILED: {ended.error}"
        return self.outcomes[job].digest or "FAILED: it has no digest"

    # -- the end ------------------------------------------------------------------------------------------------------

    def descriptors(self) -> list[str]:
        """What the executor's open descriptors are."""
        found = []
        for entry in Path(f"/proc/{self.link.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(entry.readlink()))
        return sorted(found)

    async def close(self) -> None:
        """Stop the executor and hear it out."""
        await self.link.stop(checkpoint=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listener, 10.0)


def siblings(core: int) -> str:
    """The threads that share a core with this one, as the kernel writes them; just itself where it says nothing."""
    listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return listed.read_text(encoding="ascii").strip() if listed.exists() else str(core)


def dealt(cores_of_devices: Sequence[int], apart: Sequence[int] = ()) -> list[LocalDevice]:
    """Devices with so many of this machine's cores, one after another, shared where there are too few.

    Two threads of one core are not twice as fast as one: as long as there are cores enough, devices have one of each.
    Which these are, the kernel says, or ``apart`` where it was found out otherwise.
    """
    cores = sorted(os.sched_getaffinity(0))
    if sum(cores_of_devices) <= len(apart := apart or one_of_each(cores)):
        cores = list(apart)
    devices, first = [], 0
    for place, size in enumerate(cores_of_devices):
        hand = sorted({cores[(first + offset) % len(cores)] for offset in range(size)})
        devices.append(LocalDevice(place, f"cpu:{place}", f"cpu{len(hand)}", tuple(hand)))
        first += size
    return devices


def one_of_each(cores: Sequence[int]) -> list[int]:
    """The first thread of every physical core."""
    firsts: dict[str, int] = {}
    for core in cores:
        firsts.setdefault(siblings(core), core)
    return sorted(firsts.values())


def new_mark() -> str:
    """A word that no other benchmark uses."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def marked(mark: str) -> dict[int, str]:
    """Processes that live and carry the mark, with their names."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def left_behind(mark: str, shared_before: set[str], state: Path) -> list[str]:
    """Processes, shared memory and temporary files that outlasted a run; ends the processes."""
    left = []
    for pid, name in marked(mark).items():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            ended, _, _ = select.select([handle], [], [], _SETTLE_S)
            os.close(handle)
            if not ended:
                left.append(f"process {name} ({pid})")
                os.kill(pid, 9)
    left += [f"/dev/shm/{name}" for name in sorted(shared_memory() - shared_before) if "carpool" in name]
    return left + [str(path) for path in state.rglob("*") if path.suffix in {".part", ".tmp"} or ".part" in path.name]


def shared_memory() -> set[str]:
    """Named shared memory of this machine."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
