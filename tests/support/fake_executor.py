"""Fake executor: runs no processes, in virtual time, and is its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobFailed,
    JobFinished,
    Order,
    ProgressReported,
    ReleaseApplied,
)
from carpool.core.model import JobId
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Facts, Gone, HandedOver, Outcome, Report, Sized


class FakeExecutor:
    """Every job makes one step per second and device, and ends after the steps it was given.

    Implements `ExecutorPort` and `WaitableClock` of `backends.ports`. `kept` holds the steps on disk by job.
    """

    def __init__(
        self,
        steps: Mapping[str, int],
        *,
        start: float = 0.0,
        kept: dict[JobId, float] | None = None,
        fails: Mapping[str, str] | None = None,
        batch: tuple[int, int] = (0, 0),  # size of a step and number of samples, as trainings declare them
        at_once: bool = False,  # jobs end when they are assigned: for callers with a clock of their own
    ) -> None:
        self.kept: dict[JobId, float] = {} if kept is None else kept
        self.orders: list[Order] = []
        self.introduced: dict[JobId, bool] = {}  # job: whether it resumes
        self.stopped: list[bool] = []  # whether with checkpoints, for every call
        self.life = 1
        self.heard = 0  # number of the last report received
        self.acknowledged = 0
        self.forgotten: list[JobId] = []
        self.handed_over: list[JobId] = []
        self.proceeds = 0  # number of calls
        self.is_left = False
        self._steps = steps
        self._fails = dict(fails or {})
        self._batch = batch
        self._at_once = at_once
        self._at = start
        self._running: dict[JobId, tuple[int, float, int]] = {}  # devices, since, generation
        self._queue: asyncio.Queue[Report] = asyncio.Queue()
        self._plans: list[tuple[float, Callable[[], None]]] = []

    # ------------------------------------------------------------------------------------------------ for the test
    def at(self, at: float, happening: Callable[[], None]) -> None:
        """Call a function at an instant."""
        self._plans.append((at, happening))

    def say(self, report: Report) -> None:
        """Report something."""
        self._queue.put_nowait(report)

    def die(self) -> None:
        """End the executor without warning."""
        self._running.clear()
        self.say(Gone("killed by signal 9"))

    def report_progress(self, loss: float = 1.0) -> None:
        """Report progress of all running jobs."""
        for job in list(self._running):
            devices, _, generation = self._running[job]
            self._settle(job)
            self._fact(ProgressReported(job, generation, self.kept[job], float(devices), loss))

    # ---------------------------------------------------------------------------------------------------- as a link
    async def check(self, programs: Mapping[JobId, Program], timeout_s: float) -> dict[JobId, str]:
        """All entries are fine."""
        return dict.fromkeys(programs, "")

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Make a job known."""
        self.introduced[job] = resume

    def carry(self, orders: Sequence[Order]) -> None:
        """Carry orders out at once."""
        for order in orders:
            assert order.job in self.introduced, f"job {order.job!r} was never introduced"
            self.orders.append(order)
            self._settle(order.job)
            done = self.kept.setdefault(order.job, 0.0)
            if isinstance(order, Assign):
                self._running[order.job] = (order.allocation.num_devices, self._at, order.generation)
                self.say(Sized(order.job, self._steps[order.job], *self._batch))
                self._fact(AssignApplied(order.job, order.generation, done))
                if self._at_once:
                    self._finish(order.job)
            else:
                self._running.pop(order.job, None)
                self._fact(ReleaseApplied(order.job, order.generation, done))

    def forget(self, job: JobId) -> None:
        """A job is over."""
        self.forgotten.append(job)

    def hand_over(self, job: JobId) -> None:
        """Stop a job, keep its steps on disk, and drop it."""
        self._settle(job)
        self._running.pop(job, None)
        self.introduced.pop(job, None)
        self.handed_over.append(job)
        self.say(HandedOver(job, int(self.kept.get(job, 0.0))))

    def acknowledge(self, number: int) -> None:
        """Reports up to a number are kept."""
        self.acknowledged = number

    def proceed(self) -> None:
        """Go on."""
        self.proceeds += 1

    async def leave(self) -> None:
        """Note that the client has left."""
        self.is_left = True

    async def receive(self) -> Report:
        """The next report."""
        report = await self._queue.get()
        self.heard += 1
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """Stop everything."""
        self.stopped.append(checkpoint)
        for job in list(self._running):
            self._settle(job)
        self._running.clear()
        self.say(Gone("it was told to stop"))

    # --------------------------------------------------------------------------------------------------- as a clock
    def now(self) -> float:
        """Virtual seconds."""
        return self._at

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Let tasks run; when none is done, advance the time to the next event."""
        for _ in range(5):
            await asyncio.sleep(0)
        if any(task.done() for task in tasks):
            return
        ends = {job: self._end_of(job) for job in self._running}
        planned = min((at for at, _ in self._plans), default=inf)
        following = min([planned, inf if until is None else until, *ends.values()])
        assert following < inf, "nothing will ever happen again"
        self._at = max(self._at, following)
        for plan in [plan for plan in self._plans if plan[0] <= self._at]:
            self._plans.remove(plan)
            plan[1]()
        for job, end in ends.items():
            if end <= self._at and job in self._running:
                self._finish(job)
        for _ in range(5):
            await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------------- inside
    def _fact(self, fact: Fact) -> None:
        self.say(Facts((fact,)))

    def _settle(self, job: JobId) -> None:
        if job in self._running:
            devices, since, generation = self._running[job]
            self.kept[job] = self.kept.get(job, 0.0) + devices * (self._at - since)
            self._running[job] = (devices, self._at, generation)

    def _end_of(self, job: JobId) -> float:
        devices, since, _ = self._running[job]
        return since + (self._steps[job] - self.kept.get(job, 0.0)) / devices

    def _finish(self, job: JobId) -> None:
        _, _, generation = self._running.pop(job)
        self.kept[job] = float(self._steps[job])
        if job in self._fails:
            self._fact(JobFailed(job, generation, self._fails[job]))
            return
        self.say(
            Outcome(
                job, self._steps[job], 1, 0.25, {"accuracy": 0.5}, f"digest of {job}", "reached its steps", 8.0, 1 << 28
            )
        )
        self._fact(JobFinished(job, generation))
