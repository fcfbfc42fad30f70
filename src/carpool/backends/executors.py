"""Executors of a live scheduler: ports, a group that sends orders to the right one, and an inbox of their reports."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from carpool.backends.fleet import LOCAL, OrderRouter, Owner
from carpool.core.errors import CarpoolError
from carpool.core.messages import Assign, Fact, Order
from carpool.core.model import JobId
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Report

__all__ = [
    "LOCAL",
    "ExecutorGone",
    "ExecutorGroup",
    "ExecutorPort",
    "Introduction",
    "ReportInbox",
    "WaitableClock",
    "WallClock",
]


class ExecutorGone(CarpoolError):
    """The executor process ended by itself; jobs can be resumed from their checkpoints."""


class ExecutorPort(Protocol):
    """The scheduler's end of an executor; `runtime.executor.client.ExecutorClient` is the real one."""

    @property
    def life(self) -> int:
        """Identifies the executor process: a new one numbers its reports from 1."""

    @property
    def heard(self) -> int:
        """The number of the report that `receive` returned last."""

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """Send a job's program before its first order; with `resume` it starts from its checkpoints."""

    def carry(self, orders: Sequence[Order]) -> None: ...

    def forget(self, job: JobId) -> None:
        """Drop a job that is over."""

    def hand_over(self, job: JobId) -> None:
        """Stop a job with its state on disk and drop it; `HandedOver` follows."""

    def acknowledge(self, number: int) -> None:
        """Confirm that all reports up to this one are stored."""

    def proceed(self) -> None:
        """Resume jobs that stopped because no client was connected."""

    async def receive(self) -> Report:
        """Wait for the next report; `Gone` once the executor has ended."""

    async def stop(self, *, checkpoint: bool) -> None:
        """Stop all jobs at a step boundary, checkpoint them if asked to, and end the executor."""

    async def leave(self) -> None:
        """Disconnect; the executor keeps running for the next client."""


class WaitableClock(Protocol):
    """A clock that can be waited on."""

    def now(self) -> float: ...

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Return when one of the tasks is done, or at `until`."""


class WallClock:
    """The monotonic clock, counted from `start`."""

    def __init__(self, start: float = 0.0) -> None:
        self._origin = time.monotonic() - start

    def now(self) -> float:
        return time.monotonic() - self._origin

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - self.now())
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


class Introduction(NamedTuple):
    """What an executor gets before a job's first order."""

    program: Program
    resume: bool


class ExecutorGroup:
    """The executors of a scheduler by name; each learns of a job with the first order it gets for it."""

    def __init__(self, executors: Mapping[str, ExecutorPort], owner: Owner = lambda device: LOCAL) -> None:
        self._ports = dict(executors)
        self._router = OrderRouter(tuple(executors), owner)
        self._known: dict[JobId, set[str]] = {}  # executors that know a job
        self._programs: dict[JobId, Program] = {}  # of jobs that are handed over

    def __iter__(self) -> Iterator[tuple[str, ExecutorPort]]:
        return iter(self._ports.items())

    def __getitem__(self, name: str) -> ExecutorPort:
        return self._ports[name]

    def replace(self, name: str, port: ExecutorPort) -> None:
        """Use a new executor process, which knows no jobs yet, under a name; states that the old one held are lost."""
        self._ports[name] = port
        for known in self._known.values():
            known.discard(name)
        self._router.add(name)
        for order in self._router.on_lost(name):
            self._send_waiting(order)

    def get(self, name: str) -> ExecutorPort | None:
        return self._ports.get(name)

    def remove(self, name: str) -> ExecutorPort:
        """Forget an executor that does not return; its port is left to the caller."""
        port = self._ports.pop(name)
        for known in self._known.values():
            known.discard(name)
        for order in self._router.remove(name):
            self._send_waiting(order)
        return port

    def adopt(self, name: str, held: Iterable[JobId]) -> None:
        """Record the jobs that an executor holds already."""
        for job in held:
            self._known.setdefault(job, set()).add(name)
            self._router.adopt(job, [name])

    def introduce(self, job: JobId, what: Introduction) -> None:
        """Introduce a job before its first order; among several executors the order decides which one learns of it."""
        if len(self._ports) == 1:
            self._introduce(next(iter(self._ports)), job, what)

    def _introduce(self, name: str, job: JobId, what: Introduction) -> None:
        known = self._known.setdefault(job, set())
        if name not in known:
            known.add(name)
            self._ports[name].introduce(job, what.program, resume=what.resume)

    def carry(self, orders: Sequence[Order], introductions: Mapping[JobId, Introduction]) -> None:
        """Send each order to its executors; an order for a job without a program is dropped."""
        routed: dict[str, list[Order]] = {}
        for order in orders:
            now = self._router.route(order)
            for name in now.hand_over:
                self._ports[name].hand_over(order.job)
            if order.job in introductions:
                self._programs[order.job] = introductions[order.job].program
            for name, own in now.orders.items():
                if order.job in introductions and (isinstance(own, Assign) or len(self._ports) == 1):
                    self._introduce(name, order.job, introductions[order.job])
                if name in self._known.get(order.job, ()):
                    routed.setdefault(name, []).append(own)
        for name, own_orders in routed.items():
            self._ports[name].carry(own_orders)

    def evacuate(self, name: str) -> bool:
        """Let an executor without running jobs hand over the states it holds. Returns whether it holds none by now."""
        for job in self._router.evacuate(name):
            self._ports[name].hand_over(job)
        return not self._router.holds(name)

    def handed_over(self, name: str, job: JobId) -> None:
        """An executor has written a job's state to disk and dropped the job: the next one may continue it."""
        self._known.get(job, set()).discard(name)
        order = self._router.on_handed_over(name, job)
        if order is not None:
            self._send_waiting(order)

    def _send_waiting(self, order: Assign) -> None:
        if order.job in self._programs:
            self.carry([order], {order.job: Introduction(self._programs[order.job], resume=True)})

    def current(self, name: str, facts: Sequence[Fact]) -> tuple[Fact, ...]:
        return tuple(fact for fact in facts if not self._router.is_stale(name, fact))

    def forget(self, job: JobId) -> None:
        self._router.forget(job)
        self._programs.pop(job, None)
        for name in sorted(self._known.pop(job, ())):
            self._ports[name].forget(job)


class ReportInbox:
    """Collects the reports of the executors it listens to, in the order of arrival."""

    def __init__(self, executors: ExecutorGroup, clock: WaitableClock) -> None:
        self._executors = executors
        self._clock = clock
        self._receiving: dict[str, asyncio.Task[Report]] = {}  # by executor
        self._arrived: deque[str] = deque()
        self._has_arrived = asyncio.Event()

    @property
    def names(self) -> Collection[str]:
        """The executors that are listened to."""
        return self._receiving.keys()

    def listen(self, name: str) -> None:
        """Receive the next report of an executor; after each report this is called again."""
        self.ignore(name)
        self._receiving[name] = task = asyncio.create_task(self._executors[name].receive())
        task.add_done_callback(lambda task: self._on_received(name))

    def ignore(self, name: str) -> None:
        if (receiving := self._receiving.pop(name, None)) is not None:
            receiving.cancel()

    def is_listening(self, name: str) -> bool:
        return name in self._receiving and not self._receiving[name].done()

    def _on_received(self, name: str) -> None:
        self._arrived.append(name)
        self.wake()

    def wake(self) -> None:
        """Let `wait` return."""
        self._has_arrived.set()

    async def wait(self, tasks: set[asyncio.Task[Any]], until: float | None) -> None:
        """Wait for a report, `wake`, one of the tasks, or an instant; the cost is independent of executors."""
        waiting = asyncio.create_task(self._has_arrived.wait())
        try:
            await self._clock.wait({waiting, *tasks}, until)
        finally:
            waiting.cancel()

    def take(self) -> Iterator[tuple[str, Report]]:
        """The reports that have arrived, each with its executor, which is not listened to until `listen`."""
        self._has_arrived.clear()
        for _ in range(len(self._arrived)):
            name = self._arrived.popleft()
            if name in self._receiving and self._receiving[name].done():
                yield name, self._receiving.pop(name).result()

    def close(self) -> None:
        for name in list(self._receiving):
            self.ignore(name)
