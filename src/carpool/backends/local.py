"""Local backend: the event loop that joins a scheduler to one executor, and the ports of an executor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Fact, JobFailed, JobFinished, Order, Woke
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Facts, Gone, Outcome, Report

_LAST_WORDS_S = 5.0  # how long outcomes may lag behind the facts that jobs are over


class ExecutorGone(CarpoolError):
    """The executor process ended by itself; what it kept on disk can be resumed."""


class ExecutorPort(Protocol):
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


class WaitableClock(Protocol):
    """A clock that can also be waited on."""

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when one of the tasks is done, or at `until`."""
        ...


class WallClock:
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


class RunEnd(StrEnum):
    """How a run came to its end."""

    DONE = "done"  # every job is over
    INTERRUPTED = "interrupted"  # stopped at a boundary with checkpoints: it can be resumed


class LocalBackend:
    """Runs the jobs of a scheduler on this machine until all are over or somebody interrupts.

    `take` is shown every report with its instant, after the scheduler has had the facts in it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        link: ExecutorPort,
        clock: WaitableClock,
        take: Callable[[float, Report], None] = lambda at, report: None,
    ) -> None:
        self._scheduler = scheduler
        self._link = link
        self._clock = clock
        self._take = take
        self._interrupted = asyncio.Event()
        self._hurried = asyncio.Event()
        self._receiving: asyncio.Task[Report] | None = None
        self._unreported: set[JobId] = set()  # finished jobs whose outcome has not come
        self._reported: set[JobId] = set()

    def interrupt(self) -> None:
        """Stop at the next step boundaries with checkpoints; called a second time, at once."""
        if self._interrupted.is_set():
            self._hurried.set()
        self._interrupted.set()

    async def run(self, facts: Sequence[Fact]) -> RunEnd:
        """Begin with these facts and go on to the end."""
        self._handle(self._now(), facts)
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            while self._scheduler.jobs:
                if self._interrupted.is_set():
                    await self._end(checkpoint=True)
                    return RunEnd.INTERRUPTED
                if self._fail_the_starved():
                    continue
                await self._listen({interrupted}, self._scheduler.wake_at)
                self._wake()
            await self._hear_out()
            await self._end(checkpoint=False)
        finally:
            interrupted.cancel()
            if self._receiving is not None:
                self._receiving.cancel()
        return RunEnd.DONE

    # ------------------------------------------------------------------------------------------------------- hearing
    async def _listen(self, others: set[asyncio.Task[Any]], until: float | None, *, carry: bool = True) -> None:
        """Wait for a report, for one of the others, or for an instant; take the report in if one has come."""
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._link.receive())
        await self._clock.wait({self._receiving, *others}, until)
        if self._receiving.done():
            report = self._receiving.result()
            self._receiving = None
            self._hear(report, carry=carry)

    def _hear(self, report: Report, *, carry: bool) -> None:
        at = self._now()
        match report:
            case Gone(reason=reason):
                raise ExecutorGone(f"the executor has gone: {reason}")
            case Facts(facts=facts):
                self._handle(at, facts, carry=carry)
            case Outcome(job=job):
                self._reported.add(job)
                self._unreported.discard(job)
        self._take(at, report)

    def _handle(self, at: float, facts: Sequence[Fact], *, carry: bool = True) -> None:
        if not facts:
            return
        orders = self._scheduler.handle(at, facts)
        ended = {fact.job for fact in facts if isinstance(fact, JobFinished)}
        self._unreported |= ended - self._reported
        if orders and carry:
            self._link.carry(orders)

    def _now(self) -> float:
        """The time; never before what the scheduler has seen."""
        return max(self._clock.now(), self._scheduler.at)

    def _wake(self) -> None:
        wake_at = self._scheduler.wake_at
        if wake_at is not None and self._now() >= wake_at:
            self._handle(self._now(), (Woke(),))

    def _fail_the_starved(self) -> bool:
        """Jobs that wait while nothing runs, nobody will wake the policy and nothing else will happen never run."""
        scheduler = self._scheduler
        if scheduler.num_running or scheduler.wake_at is not None or scheduler.outsiders:  # these may go
            return False
        error = f"policy {scheduler.policy!r} gives it no devices, and nothing is left to happen that could change that"
        self._handle(self._now(), [JobFailed(job.id, job.generation, error) for job in scheduler.jobs.values()])
        return True

    # -------------------------------------------------------------------------------------------------------- ending
    async def _hear_out(self) -> None:
        """Outcomes may follow the facts; wait for those of the jobs that finished, but not for ever."""
        until = self._now() + _LAST_WORDS_S
        with contextlib.suppress(ExecutorGone):
            while self._unreported and self._now() < until:
                await self._listen(set(), until, carry=False)

    async def _end(self, *, checkpoint: bool) -> None:
        """End the executor and hear its last words; what is decided meanwhile is not carried out any more."""
        stopping = asyncio.create_task(self._link.stop(checkpoint=checkpoint))
        hurried = asyncio.create_task(self._hurried.wait())
        try:
            with contextlib.suppress(ExecutorGone):
                while not hurried.done():
                    until = self._now() + _LAST_WORDS_S if stopping.done() else None
                    await self._listen({hurried} if stopping.done() else {hurried, stopping}, until, carry=False)
                    if until is not None and self._now() >= until:
                        break
            while not stopping.done() and not hurried.done():
                await self._clock.wait({stopping, hurried}, None)
            if stopping.done():
                stopping.result()
            else:
                stopping.cancel()
                await self._link.stop(checkpoint=False)
        finally:
            hurried.cancel()


class DurableExecutorPort(ExecutorPort, Protocol):
    """The near end of an executor that outlives its daemon; `runtime.link.ExecutorLink` is the real one."""

    @property
    def life(self) -> int:
        """Which executor it is: another one numbers its reports anew."""
        ...

    @property
    def heard(self) -> int:
        """The number of the report that `receive` returned last."""
        ...

    def acknowledge(self, number: int) -> None:
        """What came up to this report is kept."""
        ...

    def proceed(self) -> None:
        """Let jobs go on that stood still because nobody was there."""
        ...

    def forget(self, job: JobId) -> None:
        """A job is over and will not be asked for again."""
        ...

    async def leave(self) -> None:
        """Let the executor go on, for whoever claims it next."""
        ...
