"""Ports of a live scheduler: the executor it sends orders to, and the clock it waits on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from carpool.core.errors import CarpoolError
from carpool.core.messages import Order
from carpool.core.model import JobId
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
