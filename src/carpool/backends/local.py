"""This machine as a backend: the loop that joins a scheduler with the executor process and its facts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Fact, JobFailed, Order, Woke
from carpool.core.model import JobId, Phase
from carpool.core.scheduler import Scheduler
from carpool.runtime.program import Program
from carpool.runtime.reports import Facts, Gone, Outcome, Report

_LAST_WORDS_S = 5.0  # how long outcomes may lag behind the facts that jobs are over


class Link(Protocol):
    """The near end of an executor; `runtime.link.ExecutorLink` is the real one."""

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Make a job known before its first order."""
        ...

    def carry(self, orders: Sequence[Order]) -> None:
        """Pass orders on."""
        ...

    async def receive(self) -> Report:
        """The next report."""
        ...

    async def stop(self, *, checkpoint: bool) -> None:
        """Halt all jobs at a step boundary, keep their state if asked to, and end the executor."""
        ...


class Pace(Protocol):
    """A clock that can also be waited on."""

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when one of the tasks is done, or at `until`."""
        ...


class WallPace:
    """The real clock; a run that is resumed goes on from where its time stood."""

    def __init__(self, start: float = 0.0) -> None:
        self._origin = time.monotonic() - start

    def now(self) -> float:
        """Seconds since the run began, interruptions left out."""
        return time.monotonic() - self._origin

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when one of the tasks is done, or at `until`."""
        timeout = None if until is None else max(0.0, until - self.now())
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


class Ending(StrEnum):
    """How a run came to its end."""

    DONE = "done"  # every job is over
    INTERRUPTED = "interrupted"  # stopped at a boundary with checkpoints: it can be resumed


class LocalBackend:
    """Runs the jobs of a scheduler on this machine until all are over or somebody interrupts.

    `take` is shown every report, with its instant, after the scheduler has had the facts in it.
    """

    def __init__(
        self, scheduler: Scheduler, link: Link, pace: Pace, take: Callable[[float, Report], None] = lambda at, report: None
    ) -> None:
        self._scheduler = scheduler
        self._link = link
        self._pace = pace
        self._take = take
        self._interrupted = asyncio.Event()
        self._hurried = asyncio.Event()
        self._reported: set[JobId] = set()  # jobs whose outcome has come

    def interrupt(self) -> None:
        """Stop at the next step boundaries with checkpoints; called a second time, at once."""
        if self._interrupted.is_set():
            self._hurried.set()
        self._interrupted.set()

    async def run(self, facts: Sequence[Fact], orders: Sequence[Order] = ()) -> Ending:
        """Begin with these facts and these orders, and go on to the end."""
        self._link.carry(orders)
        self._handle(facts)
        receiving = asyncio.create_task(self._link.receive())
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            while self._scheduler.jobs:
                if self._interrupted.is_set():
                    await self._stop(receiving)
                    return Ending.INTERRUPTED
                self._fail_the_starved()
                await self._pace.wait({receiving, interrupted}, self._scheduler.wake_at)
                receiving = self._step(receiving)
            await self._hear_out(receiving)
            await self._link.stop(checkpoint=False)
        finally:
            receiving.cancel()
            interrupted.cancel()
        return Ending.DONE

    # ------------------------------------------------------------------------------------------------------- inside
    def _step(self, receiving: asyncio.Task[Report]) -> asyncio.Task[Report]:
        """Take in what has come, or the time that has come."""
        if receiving.done():
            self._hear(receiving.result())
            return asyncio.create_task(self._link.receive())
        wake_at = self._scheduler.wake_at
        if wake_at is not None and self._pace.now() >= wake_at:
            self._handle((Woke(),))
        return receiving

    def _hear(self, report: Report, *, carry: bool = True) -> None:
        if isinstance(report, Gone):
            raise CarpoolError(f"the executor has gone: {report.reason}. Jobs can be resumed from their checkpoints.")
        at = self._now()
        if isinstance(report, Facts):
            self._handle(report.facts, at, carry=carry)
        elif isinstance(report, Outcome):
            self._reported.add(report.job)
        self._take(at, report)

    def _now(self) -> float:
        """The time; never before what the scheduler has seen."""
        return max(self._pace.now(), self._scheduler.at)

    def _handle(self, facts: Sequence[Fact], at: float | None = None, *, carry: bool = True) -> None:
        if facts:
            orders = self._scheduler.handle(self._now() if at is None else at, facts)
            if orders and carry:
                self._link.carry(orders)

    def _fail_the_starved(self) -> None:
        """Jobs that wait while nothing runs, nothing will wake the policy and nothing else will happen never run."""
        scheduler = self._scheduler
        if scheduler.num_running or scheduler.wake_at is not None:
            return
        error = f"policy {scheduler.policy!r} gives it no devices, and nothing is left that could change its mind"
        waiting = [job for job in scheduler.jobs.values() if job.phase is Phase.WAITING]
        self._handle([JobFailed(job.id, job.generation, error) for job in waiting])

    async def _hear_out(self, receiving: asyncio.Task[Report]) -> None:
        """Outcomes may follow the facts; wait for those of the jobs that finished, but not for ever."""
        until = self._pace.now() + _LAST_WORDS_S
        while self._unreported() and self._pace.now() < until:
            await self._pace.wait({receiving}, until)
            if receiving.done():
                report = receiving.result()
                if isinstance(report, Gone):
                    return
                self._hear(report, carry=False)
                receiving = asyncio.create_task(self._link.receive())
        receiving.cancel()

    def _unreported(self) -> bool:
        return any(job not in self._reported for job in self._finished)

    async def _stop(self, receiving: asyncio.Task[Report]) -> None:
        """Stop the executor while it still talks; what is decided meanwhile is not carried out any more."""
        stopping = asyncio.create_task(self._link.stop(checkpoint=True))
        hurried = asyncio.create_task(self._hurried.wait())
        try:
            while not stopping.done() and not hurried.done():
                await self._pace.wait({stopping, receiving, hurried}, None)
                if receiving.done():
                    report = receiving.result()
                    if isinstance(report, Gone):
                        break
                    self._hear(report, carry=False)
                    receiving = asyncio.create_task(self._link.receive())
            if hurried.done():
                stopping.cancel()
                await self._link.stop(checkpoint=False)
            else:
                await stopping
        finally:
            receiving.cancel()
            hurried.cancel()
