"""One executor for several runs, so that torch is imported once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from carpool.backends.executors import ExecutorPort
from carpool.core.messages import Order
from carpool.core.model import JobId
from carpool.jobs.devices import LocalDevice
from carpool.jobs.program import Program
from carpool.runtime.executor.reports import Gone, Report


class SharedExecutor:
    """An executor for several runs, each of which only seems to stop it."""

    def __init__(self, link: ExecutorPort) -> None:
        self._link = link
        self._hearing: asyncio.Task[Report] | None = None
        self._over = asyncio.Event()

    @property
    def life(self) -> int:
        """As it is."""
        return self._link.life

    @property
    def heard(self) -> int:
        """As it is."""
        return self._link.heard

    def forget(self, job: JobId) -> None:
        """As it is."""
        self._link.forget(job)

    def hand_over(self, job: JobId) -> None:
        """As it is."""
        self._link.hand_over(job)

    def acknowledge(self, number: int) -> None:
        """As it is."""
        self._link.acknowledge(number)

    def proceed(self) -> None:
        """As it is."""
        self._link.proceed()

    async def leave(self) -> None:
        """End the run, not the executor."""
        self._over.set()

    async def lend(self, devices: Sequence[LocalDevice], state: Path) -> SharedExecutor:
        """Start the next run on it."""
        self._over = asyncio.Event()
        return self

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        """As it is."""
        self._link.introduce(job, program, resume=resume)

    def carry(self, orders: Sequence[Order]) -> None:
        """As it is."""
        self._link.carry(orders)

    async def receive(self) -> Report:
        """The next report, until the run stops."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._link.receive())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait({self._hearing, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not self._hearing.done():
            return Gone("given back")
        report = self._hearing.result()
        self._hearing = None
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """End the run, not the executor."""
        self._over.set()

    async def close(self) -> None:
        """End the executor."""
        await self._link.stop(checkpoint=False)
        if self._hearing is not None:
            await self._hearing
