"""Worker pool: starts worker processes through the fork server, sends and receives messages, detects hangs."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.runtime.process.channel import AsyncChannel, Closed, close_all, pair
from carpool.runtime.process.forkserver import ForkServer, ForkServerDied
from carpool.runtime.process.protocol import Begin, Exited, Message, Prewarm

WorkerKey = tuple[str, int]  # job and number of a worker
MakeForkServer = Callable[
    [Callable[[Exited], object], Callable[[str], object]], ForkServer
]  # after its ears: exits, its end

_DRAIN_S = 2.0  # after a worker's end, for what it said before
_MAX_FORKSERVER_FAILURES = 5  # that may die before any of them forked a worker


class WorkerListener(Protocol):
    """Who wants to know what becomes of workers."""

    def heard(self, who: WorkerKey, message: Message) -> None:
        """A worker said something."""
        ...

    def ended(self, who: WorkerKey, why: str) -> None:
        """A worker's process is gone, and all it said has been heard."""
        ...


@dataclass(slots=True, eq=False)
class _Process:
    key: WorkerKey
    channel: AsyncChannel
    heard_at: float
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    pid: int = 0  # 0: not forked yet
    doomed: bool = False
    exit: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    """All workers of an executor. A fork server that dies takes them along and is replaced."""

    def __init__(
        self, ears: WorkerListener, clock: Callable[[], float], make_forkserver: MakeForkServer = ForkServer
    ) -> None:
        self._ears = ears
        self._clock = clock
        self._make_forkserver = make_forkserver
        self._processes: dict[WorkerKey, _Process] = {}
        self._by_pid: dict[int, _Process] = {}
        self._early: dict[int, str] = {}  # exits that were reported before the fork was
        self._forkserver: ForkServer | None = None
        self._is_there = asyncio.Event()  # the first forkserver is, or was
        self._restart: asyncio.Task[None] | None = None
        self._failures = 0
        self._is_stopping = False
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # no fork server can be had

    async def start(self) -> None:
        """Start the fork server."""
        forkserver = self._make_forkserver(self._on_exit, self._on_gone)
        await forkserver.start()
        self._forkserver = forkserver
        self._is_there.set()

    def begin(self, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        """Start a worker, with the descriptors of its log and of what else belongs to `Begin`."""
        self._hire(key, begin, log, [log, *beside])

    def seat(self, key: WorkerKey, warm: Prewarm) -> None:
        """Start a process for a job that is not known yet."""
        self._hire(key, warm)

    def hand_over(self, seat: WorkerKey, key: WorkerKey, begin: Begin, log: int, *beside: int) -> None:
        """Make a seated process a worker."""
        process = self._processes[key] = self._processes.pop(seat)
        process.key = key
        process.channel.send(begin, [log, *beside])

    def _hire(self, key: WorkerKey, first: Begin | Prewarm, log: int | None = None, fds: Sequence[int] = ()) -> None:
        ours, theirs = pair()
        process = _Process(key, AsyncChannel(ours), self._clock())
        self._processes[key] = process
        process.channel.send(first, fds)
        process.tasks.append(asyncio.create_task(self._fork(process, theirs, log)))
        process.tasks.append(asyncio.create_task(self._listen(process)))

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Say something to a worker; nothing happens if it is gone."""
        process = self._processes.get(key)
        if process is not None:
            process.channel.send(message, fds)

    def kill(self, key: WorkerKey) -> None:
        """End a worker by force; its end is reported as any other."""
        process = self._processes.get(key)
        if process is None:
            return
        process.doomed = True
        if process.pid and self._forkserver is not None and not process.exit.done():
            self._forkserver.kill(process.pid, signal.SIGKILL)

    def silent_for(self, seconds: float) -> list[WorkerKey]:
        """Workers that have not been heard for so long."""
        limit = self._clock() - seconds
        return [p.key for p in self._processes.values() if p.pid and p.heard_at < limit and not p.exit.done()]

    async def stop(self) -> None:
        """End everything; returns when all processes are gone."""
        self._is_stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if self._forkserver is not None:
            await self._forkserver.stop()
        for process in self._processes.values():
            for task in process.tasks:
                task.cancel()
            process.channel.close()

    async def _fork(self, process: _Process, theirs: socket.socket, log: int | None) -> None:
        with theirs:
            try:
                await self._is_there.wait()
                while self._forkserver is None:
                    assert self._restart is not None
                    await asyncio.shield(self._restart)
                process.pid = await self._forkserver.fork(theirs, log)
            except (CarpoolError, OSError) as error:
                self._exit(process, str(error))
                return
        self._failures = 0
        process.heard_at = self._clock()
        self._by_pid[process.pid] = process
        if process.pid in self._early:
            self._exit(process, self._early.pop(process.pid))
        elif process.doomed:
            self._forkserver.kill(process.pid, signal.SIGKILL)

    async def _listen(self, process: _Process) -> None:
        """Hear a worker out, then report its end."""
        hearing = asyncio.create_task(self._hear(process))
        process.tasks.append(hearing)
        why = await process.exit
        await asyncio.wait([hearing], timeout=_DRAIN_S)
        hearing.cancel()
        process.channel.close()
        del self._processes[process.key]
        self._by_pid.pop(process.pid, None)
        self._ears.ended(process.key, why)

    async def _hear(self, process: _Process) -> None:
        while True:
            try:
                message, fds = await process.channel.receive()
            except Closed:
                return
            except CarpoolError:
                self.kill(process.key)  # it does not speak our language
                return
            close_all(fds)
            process.heard_at = self._clock()
            self._ears.heard(process.key, message)

    def _on_exit(self, exited: Exited) -> None:
        code = exited.code
        why = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        process = self._by_pid.get(exited.pid)
        if process is None:
            self._early[exited.pid] = why
        else:
            self._exit(process, why)

    def _exit(self, process: _Process, why: str) -> None:
        if not process.exit.done():
            process.exit.set_result(why)

    def _on_gone(self, reason: str) -> None:
        """The fork server died: so have its workers, and another one takes its place."""
        dead, self._forkserver = self._forkserver, None
        self._early.clear()
        self._failures += 1
        self._restart = asyncio.create_task(self._replace(dead, reason))
        for process in self._processes.values():
            if process.pid:
                self._exit(process, f"the fork server ended: {reason}")

    async def _replace(self, dead: ForkServer | None, reason: str) -> None:
        if dead is not None:
            await dead.stop()  # else its socket and its number stay taken
        while self._failures <= _MAX_FORKSERVER_FAILURES:
            try:
                return await self.start()
            except ForkServerDied as error:  # what killed the one before may hit this one too, before it can fork
                self._failures += 1
                reason = str(error)
        words = f"{self._failures} fork_servers ended one after another; the last one: {reason}"
        if not self.broken.done():
            self.broken.set_result(words)
        raise ForkServerDied(words)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
