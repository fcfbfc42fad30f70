"""Executor access: how a daemon reaches its executor, as a process that outlives it or as a child."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from carpool.backends.executors import LOCAL, ExecutorPort
from carpool.backends.fleet import Member
from carpool.core.errors import CarpoolError
from carpool.core.model import JobId
from carpool.core.topology import Path as LinkPath
from carpool.jobs.devices import LocalDevice
from carpool.jobs.environment import daemon_environment
from carpool.runtime.executor.client import Claim, ClaimRefused, ExecutorClient, ExecutorOptions, ExecutorSocket
from carpool.runtime.executor.client_protocol import Inventory
from carpool.runtime.executor.job_guard import marked_job
from carpool.service.store.store import Store

_SILENCE_S = 60.0  # after which an executor counts as hung and is replaced

StartExecutor = Callable[[Sequence[LocalDevice], Path], Awaitable[ExecutorPort]]


class ClaimSource:
    """Makes claims on an executor, each with a higher epoch than the one before."""

    def __init__(
        self,
        store: Store,
        devices: Sequence[LocalDevice],
        options: ExecutorOptions,
        commit: Callable[[], Awaitable[None]],
        name: str = LOCAL,
    ) -> None:
        self.name = name  # of the executor
        self._store = store
        self._devices = devices
        self._options = options
        self._commit = commit

    def next(self) -> Claim:
        """A claim of the next epoch, which is durable with the next commit."""
        mark = self._store.mark
        epoch, (life, heard) = mark.epoch + 1, mark.of(self.name)
        self._store.mark = mark._replace(epoch=epoch)
        return Claim(self._devices, self._store.folder, self._options, epoch, life, heard)

    async def next_durable(self) -> Claim:
        """A claim of the next epoch, which is durable before any executor sees it."""
        claim = self.next()
        await self._commit()
        return claim

    @property
    def is_known(self) -> bool:
        """Whether the store names an executor of this member, which has then joined before."""
        return self._store.mark.of(self.name).life > 0

    def outnumbered(self, epoch: int) -> None:
        """Continue after an epoch that an executor has seen and the store has lost."""
        self._store.mark = self._store.mark._replace(epoch=epoch)


class Unreachable(CarpoolError):
    """A member cannot be reached; `port` stands for it until it returns."""

    def __init__(self, problem: str, port: ExecutorPort) -> None:
        super().__init__(problem)
        self.port = port


class ClaimedExecutor(ExecutorPort, Protocol):
    """An executor that says which jobs it holds."""

    inventory: Inventory


class ExecutorAccess(Protocol):
    """How an executor is found, started and replaced."""

    max_restarts: int  # within a minute
    found: Member | None  # the member, once it is reached, if it was away at the start

    async def find(self, claims: ClaimSource, tell: Callable[[str], None]) -> ClaimedExecutor | None:
        """Claim an executor that an earlier daemon left running; None if there is none."""

    async def start(self, claims: ClaimSource) -> ExecutorPort:
        """Start an executor; `Unreachable` for a member that is away."""

    def job_in_hand(self) -> JobId | None:
        """The job that the last executor was handling when it died; None if it was handling none."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A machine of the daemon and how its executor is reached."""

    member: Member
    access: ExecutorAccess
    measure: Callable[[str], Awaitable[LinkPath | None]] | None = None  # of the link to another member; None: it cannot


class PersistentExecutor:
    """An executor that outlives its daemon and is reached by a Unix socket in a folder."""

    max_restarts = 5
    found: Member | None = None

    def __init__(self, folder: Path, options: ExecutorOptions) -> None:
        self._socket = ExecutorSocket(folder)
        self._environment = {**daemon_environment(os.environ, options.pass_env), **options.environment}

    async def find(self, claims: ClaimSource, tell: Callable[[str], None]) -> ExecutorClient | None:
        """Claim the executor behind the socket; one that does not answer is killed."""
        while (end := self._socket.connect()) is not None:
            try:
                return await ExecutorClient.claim(end, await self._claim(claims))
            except ClaimRefused as refused:  # this process holds the folder, so the executor is its own
                claims.outnumbered(refused.epoch)
            except CarpoolError as error:
                tell(f"The executor of the previous daemon did not answer ({error}); it was killed.")
                await self._socket.kill_executor()
        return None

    async def start(self, claims: ClaimSource) -> ExecutorPort:
        end, process = self._socket.start_executor(self._environment)
        try:
            return await ExecutorClient.claim(end, await self._claim(claims), process)
        except CarpoolError as error:
            raise CarpoolError(f"{error} {self._socket.log_tail}") from error

    async def _claim(self, claims: ClaimSource) -> Claim:
        claim = await claims.next_durable()
        options = replace(claim.options, on_orphan="wait", job_marker=str(self._socket.job_marker))
        return replace(claim, options=options, silence_s=_SILENCE_S)

    def job_in_hand(self) -> JobId | None:
        return marked_job(self._socket.job_marker)

    def close(self) -> None:
        if not self._socket.is_answered:
            self._socket.remove()


class ChildExecutor:
    """An executor that ends with this process and is not replaced."""

    max_restarts = 0
    found: Member | None = None

    def __init__(self, start: StartExecutor) -> None:
        self._start = start

    async def find(self, claims: ClaimSource, tell: Callable[[str], None]) -> ExecutorClient | None:
        return None

    async def start(self, claims: ClaimSource) -> ExecutorPort:
        claim = claims.next()
        return await self._start(claim.devices, claim.state)

    def job_in_hand(self) -> JobId | None:
        return None

    def close(self) -> None:
        """Nothing to close: the executor ends with this process."""
