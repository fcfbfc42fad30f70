"""Executors of a live scheduler: executor and clock ports, and a group that routes orders by device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Assign, Fact, Order, Release
from carpool.core.model import DeviceId, JobId
from carpool.jobs.devices import NODE_NAME
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Report

LOCAL = NODE_NAME  # the executor of this machine


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

    def acknowledge(self, number: int) -> None:
        """Confirm that all reports up to this one are stored."""

    def proceed(self) -> None:
        """Resume jobs that stopped because no client was connected."""

    async def receive(self) -> Report:
        """Wait for the next report; `Gone` once the executor has ended."""

    async def stop(self, *, checkpoint: bool) -> None:
        """Stop all jobs at a step boundary, checkpoint them if asked to, and end the executor."""

    async def leave(self) -> None:
        """Disconnect and let the executor go on for the next client."""


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


Owner = Callable[[DeviceId], str]  # the name of the executor that owns a device


class Introduction(NamedTuple):
    """What an executor gets before a job's first order."""

    program: Program
    resume: bool


class OrderRouter:
    """Decides which executors get an order.

    An `Assign` goes to the executors that own its devices, and as a `Release` to those that ran the job before. A
    `Release` goes to the executors that run the job; with none of them, to every executor.
    """

    def __init__(self, names: Collection[str], owner: Owner) -> None:
        self._names = tuple(names)
        self._owner = owner
        self._runners: dict[JobId, frozenset[str]] = {}  # executors of the newest Assign

    def route(self, order: Order) -> dict[str, Order]:
        before = self._runners.get(order.job, frozenset())
        if isinstance(order, Assign):
            now = frozenset(self._owner(device) for device in order.allocation.devices())
            self._runners[order.job] = now
            released: dict[str, Order] = {name: Release(order.job, order.generation) for name in before - now}
            return released | dict.fromkeys(sorted(now), order)
        return dict.fromkeys(sorted(before) or self._names, order)

    def is_stale(self, name: str, fact: Fact) -> bool:
        """Whether a fact is about a job that another executor runs by now."""
        runners = self._runners.get(getattr(fact, "job", JobId("")))
        return runners is not None and name not in runners

    def forget(self, job: JobId) -> None:
        self._runners.pop(job, None)


class ExecutorGroup:
    """The executors of a scheduler by name; each learns of a job with the first order it gets for it."""

    def __init__(self, executors: Mapping[str, ExecutorPort], owner: Owner = lambda device: LOCAL) -> None:
        self._ports = dict(executors)
        self._router = OrderRouter(tuple(executors), owner)
        self._known: dict[str, set[JobId]] = {name: set() for name in executors}

    def __iter__(self) -> Iterator[tuple[str, ExecutorPort]]:
        return iter(self._ports.items())

    def __getitem__(self, name: str) -> ExecutorPort:
        return self._ports[name]

    def replace(self, name: str, port: ExecutorPort, known: Collection[JobId] = ()) -> None:
        """Use another executor process under a name; `known` are the jobs that it has."""
        self._ports[name] = port
        self._known[name] = set(known)

    def introduce(self, job: JobId, what: Introduction) -> None:
        for name in self._ports:
            self._introduce(name, job, what)

    def _introduce(self, name: str, job: JobId, what: Introduction) -> None:
        if job not in self._known[name]:
            self._known[name].add(job)
            self._ports[name].introduce(job, what.program, resume=what.resume)

    def carry(self, orders: Sequence[Order], introductions: Mapping[JobId, Introduction]) -> None:
        """Send each order to its executors; an order for a job without a program is dropped."""
        routed: dict[str, list[Order]] = {}
        for order in orders:
            for name, own in self._router.route(order).items():
                if order.job in introductions:
                    self._introduce(name, order.job, introductions[order.job])
                if order.job in self._known[name]:
                    routed.setdefault(name, []).append(own)
        for name, own_orders in routed.items():
            self._ports[name].carry(own_orders)

    def current(self, name: str, facts: Sequence[Fact]) -> tuple[Fact, ...]:
        return tuple(fact for fact in facts if not self._router.is_stale(name, fact))

    def forget(self, job: JobId) -> None:
        self._router.forget(job)
        for name, known in self._known.items():
            if job in known:
                known.discard(job)
                self._ports[name].forget(job)
