"""Remote member: the executor of another machine behind the scheduler's port.

The port survives a broken link for as long as the executor's lease: it connects again and repeats what was lost. Code
and checkpoints go ahead of a job's introduction. A job's files are fetched before the report of its end or handover is
delivered, so if that report is repeated, so is the fetch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from carpool.backends.job_transfer import JobTransfer
from carpool.core.errors import CarpoolError, InputError
from carpool.core.messages import Assign, JobCancelled, JobFailed, JobFinished, Order, Release
from carpool.core.model import JobId
from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.client import ExecutorClient
from carpool.runtime.executor.client_protocol import Inventory
from carpool.runtime.executor.reports import Facts, Gone, HandedOver, Report
from carpool.runtime.remote.remote_link import LINK_ERRORS
from carpool.runtime.remote.remote_worker_stream import Peer

_RETRY_S = 0.2
_SYNC_S = 1.0  # between fetches of logs, checkpoints and mirrors of running jobs
_log = logging.getLogger(__name__)
T = TypeVar("T")

# Claims the executor again, given the broken client and the number of its last stored report.
Reclaim = Callable[[ExecutorClient, int], Awaitable[ExecutorClient | None]]


class _Numbered(NamedTuple):
    number: int | None  # of the executor's report; None for one of this port
    report: Report


class RemoteMember:
    """Implements `ExecutorPort` over a connection that is renewed when it breaks."""

    def __init__(
        self,
        name: str,
        client: ExecutorClient,
        reclaim: Reclaim,
        transfer: JobTransfer,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
        peers: Mapping[str, Peer] | None = None,
    ) -> None:
        self.name = name
        self.inventory: Inventory = client.inventory
        self.heard = client.heard
        self._client = client
        self._reclaim = reclaim
        self._transfer = transfer
        self._clock = clock
        self._grace_s = grace_s  # from the last answered heartbeat until the member counts as lost
        self._peers = {} if peers is None else peers  # all members by name, kept up to date
        self._stored = client.heard  # number of the last report that is durable
        self._held = set(client.inventory.jobs)  # jobs that it has or was sent, perhaps by an earlier daemon
        self._programs: dict[JobId, Program] = {}  # as they run there
        self._orders: dict[JobId, Order] = {}  # the newest
        self._leaving: set[JobId] = set()
        self._problems: dict[JobId, str] = {}  # why a job cannot run there
        self._is_ending = False
        self._is_over = asyncio.Event()  # the last report is delivered
        self._outgoing: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._incoming: asyncio.Queue[_Numbered] = asyncio.Queue()
        self._reports: asyncio.Queue[_Numbered] = asyncio.Queue()
        self._tasks = [asyncio.create_task(run()) for run in (self._send, self._listen, self._deliver, self._sync)]

    @property
    def life(self) -> int:
        return self.inventory.life

    def introduce(self, job: JobId, program: Program, *, resume: bool = False) -> None:
        async def bring() -> None:
            try:
                there = await self._while_reachable(lambda: self._transfer.bring(job, program, resume=resume))
            except (InputError, OSError) as error:
                self._problems[job] = f"cannot run on {self.name}: {error}"
                return
            if there is not None:
                self._held.add(job)
                self._programs[job] = there
                self._client.introduce(job, there, resume=resume)

        self._problems.pop(job, None)
        self._outgoing.put_nowait(bring)

    def carry(self, orders: Sequence[Order]) -> None:
        async def carry() -> None:
            able = [order for order in orders if order.job not in self._problems]
            self._orders.update({order.job: order for order in able})
            self._client.carry(able, self._peers_for(able))
            for order in orders:
                if order.job in self._problems and isinstance(order, Assign):
                    failed = JobFailed(order.job, order.generation, self._problems[order.job])
                    self._reports.put_nowait(_Numbered(None, Facts((failed,))))

        self._outgoing.put_nowait(carry)

    def _peers_for(self, orders: Sequence[Order]) -> list[Peer]:
        """The other members that own devices of these orders."""
        wanted = {device for order in orders if isinstance(order, Assign) for device in order.allocation.devices()}
        others = [peer for name, peer in self._peers.items() if name != self.name]
        return [peer for peer in others if any(device.id in wanted for device in peer.devices)]

    def hand_over(self, job: JobId) -> None:
        async def hand_over() -> None:
            self._leaving.add(job)
            self._client.hand_over(job)

        self._outgoing.put_nowait(hand_over)

    def forget(self, job: JobId) -> None:
        async def forget() -> None:
            self._client.forget(job)
            self._drop(job)
            with contextlib.suppress(InputError, OSError):
                await self._transfer.drop(job)

        self._outgoing.put_nowait(forget)

    def acknowledge(self, number: int) -> None:
        self._stored = number
        self._client.acknowledge(number)

    def proceed(self) -> None:
        self._client.proceed()

    async def receive(self) -> Report:
        number, report = await self._reports.get()
        self.heard = self.heard if number is None else number
        if isinstance(report, Gone):
            self._reports.put_nowait(_Numbered(None, report))  # on every further call
        return report

    async def stop(self, *, checkpoint: bool) -> None:
        """Stop all jobs and end the executor; with a checkpoint the jobs' files are fetched."""
        self._is_ending = True
        await self._client.stop(checkpoint=checkpoint)
        await self._is_over.wait()
        for job in sorted(self._held) if checkpoint else ():
            with contextlib.suppress(InputError, OSError):
                await self._transfer.fetch(job)
        self.close()

    async def leave(self) -> None:
        self._is_ending = True
        await self._client.leave()
        self.close()

    def close(self) -> None:
        """End all tasks of this port and its connection for files."""
        for task in self._tasks:
            task.cancel()
        self._transfer.close()

    def _drop(self, job: JobId) -> None:
        for table in (self._programs, self._orders, self._problems):
            table.pop(job, None)
        self._held.discard(job)
        self._leaving.discard(job)

    async def _send(self) -> None:
        while True:
            await (await self._outgoing.get())()

    async def _listen(self) -> None:
        """Read the connection at all times: heartbeats are answered even while files are fetched."""
        while True:
            report = await self._client.receive()
            if isinstance(report, Gone) and not self._is_ending and await self._reconnect(report.reason):
                continue
            self._incoming.put_nowait(_Numbered(self._client.heard, report))
            if isinstance(report, Gone):
                return

    async def _deliver(self) -> None:
        while True:
            numbered = await self._incoming.get()
            is_complete = all([await self._fetch(job) for job in _leaving_jobs(numbered.report)])
            if isinstance(numbered.report, HandedOver):
                self._drop(numbered.report.job)
                with contextlib.suppress(InputError, OSError):
                    if is_complete:
                        await self._transfer.drop(numbered.report.job)
            self._reports.put_nowait(numbered)
            if isinstance(numbered.report, Gone):
                self._is_over.set()
                if not self._is_ending:
                    self.close()
                return

    async def _fetch(self, job: JobId) -> bool:
        """Fetch all files of a job; False if they cannot be read there or written here."""
        try:
            await self._while_reachable(lambda: self._transfer.fetch(job))
        except (InputError, OSError) as error:
            log_event(_log, "files_lost", level=logging.ERROR, executor=self.name, job=job, error=str(error))
            return False
        return True

    async def _while_reachable(self, request: Callable[[], Awaitable[T]]) -> T | None:
        """The result of a request, which is repeated while the link is broken; None once the member is lost."""
        while True:
            try:
                return await request()
            except LINK_ERRORS:
                if self._is_lost:
                    return None
                await asyncio.sleep(_RETRY_S)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            for job in sorted(self._held):  # one may leave, and continue elsewhere, while another is fetched
                if job in self._held and not isinstance(self._orders.get(job), Release):
                    with contextlib.suppress(InputError, OSError):
                        await self._transfer.fetch(job)

    @property
    def _is_lost(self) -> bool:
        return self._clock() > self._client.answered_at + self._grace_s

    async def _reconnect(self, reason: str) -> bool:
        """Claim the same executor again before its lease has ended; False if it is gone or the time is up."""
        log_event(_log, "link_broken", level=logging.WARNING, executor=self.name, reason=reason)
        while not self._is_lost:
            left_s = self._client.answered_at + self._grace_s - self._clock()
            try:
                client = await asyncio.wait_for(self._reclaim(self._client, self._stored), max(_RETRY_S, left_s))
            except (CarpoolError, OSError):  # a timeout is one
                await asyncio.sleep(_RETRY_S)
                continue
            if client is None:
                return False
            self._client = client
            self._repeat(client)
            log_event(_log, "link_restored", executor=self.name)
            return True
        return False

    def _repeat(self, client: ExecutorClient) -> None:
        """Repeat what the executor has not received."""
        held = client.inventory.jobs
        for job in held:
            if job not in self._held:
                client.forget(job)
        for job, program in self._programs.items():
            if job not in held and job not in self._leaving:
                client.introduce(job, program, resume=True)
        behind = [
            order
            for job, order in self._orders.items()
            if job not in held or held[job].generation < order.generation
            if job not in self._leaving
        ]
        client.carry(behind, self._peers_for(behind))
        for job in self._leaving:
            client.hand_over(job)
        client.proceed()


def _leaving_jobs(report: Report) -> list[JobId]:
    """Jobs whose files are complete with this report."""
    if isinstance(report, HandedOver):
        return [report.job]
    facts = report.facts if isinstance(report, Facts) else ()
    return [fact.job for fact in facts if isinstance(fact, JobFinished | JobFailed | JobCancelled)]
