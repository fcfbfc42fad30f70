"""Worker pool: starts worker processes through the fork server, sends and receives messages, detects hangs."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.logs import log_event
from carpool.runtime.process.channel import AsyncChannel, Closed, close_all, pair
from carpool.runtime.process.forkserver import ForkServer, ForkServerDied
from carpool.runtime.process.launch import Launched
from carpool.runtime.process.protocol import (
    Begin,
    CheckEntry,
    Exited,
    Forked,
    Message,
    Prewarm,
    RunProgram,
    WorkerFailed,
)

WorkerKey = tuple[str, int]  # job and number of a worker
MakeForkServer = Callable[[Callable[[Exited], object], Callable[[str], object]], ForkServer]

_DRAIN_S = 2.0  # after a worker's exit, for messages it sent before
_MAX_FAILURES = 5  # the executor ends if more fork servers than this die in a row without a fork
_log = logging.getLogger(__name__)


class WorkerListener(Protocol):
    """Receives the messages and exits of workers."""

    def on_message(self, key: WorkerKey, message: Message) -> None: ...

    def on_exit(self, key: WorkerKey, why: str) -> None:
        """Called when the process has exited and all its messages were delivered."""


@dataclass(slots=True, eq=False)
class _Process:
    key: WorkerKey
    channel: AsyncChannel
    heard_at: float
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    pid: int = 0  # 0: not forked yet
    kill_requested: bool = False
    exit: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    """All worker processes of an executor. If the fork server dies, they die with it and a new one is started."""

    def __init__(
        self, listener: WorkerListener, clock: Callable[[], float], make_forkserver: MakeForkServer = ForkServer
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._make_forkserver = make_forkserver
        self._processes: dict[WorkerKey, _Process] = {}
        self._by_pid: dict[int, _Process] = {}
        self._detached: set[int] = set()  # processes that only start a program
        self._early_exits: dict[int, str] = {}  # exits reported before the answer to the fork
        self._forkserver: ForkServer | None = None
        self._was_started = asyncio.Event()
        self._restart: asyncio.Task[None] | None = None
        self._failures = 0
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why no fork server starts

    async def start(self, launched: Launched | None = None) -> None:
        """Wait for the fork server; processes that were requested earlier are forked then."""
        forkserver = self._make_forkserver(self._on_worker_exit, self._on_forkserver_death)
        began = self._clock()
        await forkserver.start(launched)
        self._forkserver = forkserver
        self._was_started.set()
        log_event(_log, "forkserver_ready", seconds=round(self._clock() - began, 3))

    def begin(self, launched: Launched | None = None) -> None:
        """Start it in the background; `broken` is set if no fork server starts."""
        self._restart = asyncio.create_task(self._begin(launched))

    @property
    def is_ready(self) -> bool:
        """Whether a fork server has started; processes that are requested earlier wait for it."""
        return self._was_started.is_set()

    async def ready(self) -> None:
        """Return when processes can be forked."""
        await self._was_started.wait()

    def launch(self, key: WorkerKey, begin: Begin, log: int, *fds: int) -> None:
        """Start a worker in a new process; its log and the other descriptors of `Begin` stay the caller's."""
        self._start_process(key, begin, log, [log, *fds])

    def prewarm(self, key: WorkerKey, prewarm: Prewarm) -> None:
        self._start_process(key, prewarm)

    def check(self, key: WorkerKey, request: CheckEntry) -> None:
        """Start a process that calls an entry."""
        self._start_process(key, request)

    def assign(self, prewarmed: WorkerKey, key: WorkerKey, begin: Begin, log: int, *fds: int) -> None:
        process = self._processes[key] = self._processes.pop(prewarmed)
        # a process that only checked an entry has sent no heartbeat yet
        process.key, process.heard_at = key, self._clock()
        process.channel.send(begin, [log, *fds])

    async def run_program(self, request: RunProgram, *fds: int) -> tuple[AsyncChannel, Forked]:
        """Start a Python program in a fork of the fork server. Returns the channel to its reaper and the answer."""
        await self._was_started.wait()
        if self._forkserver is None:
            raise ForkServerDied("the fork server is being replaced")
        ours, theirs = pair()
        channel = AsyncChannel(ours)
        try:
            channel.send(request, fds)
            with theirs:
                pid = await self._forkserver.fork(theirs)
            if self._early_exits.pop(pid, None) is None:
                self._detached.add(pid)
            answer = (await channel.receive()).message
            assert isinstance(answer, Forked)
        except BaseException:
            channel.close()
            raise
        return channel, answer

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message; ignored if the worker has exited."""
        process = self._processes.get(key)
        if process is not None:
            process.channel.send(message, fds)

    def kill(self, key: WorkerKey) -> None:
        """Kill a worker; its exit is reported as any other."""
        process = self._processes.get(key)
        if process is None:
            return
        process.kill_requested = True
        if not process.pid and self._forkserver is None:  # no fork server is left to start it
            process.tasks[0].cancel()
            self._set_exit(process, "it had not been started")
        elif process.pid and self._forkserver is not None and not process.exit.done():
            self._forkserver.kill(process.pid, signal.SIGKILL)

    def pid_of(self, key: WorkerKey) -> int:
        """The process of a worker; 0: none, or not forked yet."""
        process = self._processes.get(key)
        return process.pid if process is not None else 0

    def without_heartbeat(self, seconds: float) -> list[WorkerKey]:
        limit = self._clock() - seconds
        return [p.key for p in self._processes.values() if p.pid and p.heard_at < limit and not p.exit.done()]

    async def stop(self) -> None:
        """Kill all processes; returns when they are gone."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        if self._forkserver is not None:
            await self._forkserver.stop()
        for process in self._processes.values():
            for task in process.tasks:
                task.cancel()
            process.channel.close()

    def _start_process(
        self, key: WorkerKey, first: Begin | Prewarm | CheckEntry, log: int | None = None, fds: Sequence[int] = ()
    ) -> None:
        ours, theirs = pair()
        process = _Process(key, AsyncChannel(ours), self._clock())
        self._processes[key] = process
        process.channel.send(first, fds)
        process.tasks.append(asyncio.create_task(self._fork(process, theirs, log)))
        process.tasks.append(asyncio.create_task(self._follow(process)))

    async def _fork(self, process: _Process, theirs: socket.socket, log: int | None) -> None:
        with theirs:
            try:
                await self._was_started.wait()
                while self._forkserver is None:
                    assert self._restart is not None
                    await asyncio.shield(self._restart)
                process.pid = await self._forkserver.fork(theirs, log)
            except (CarpoolError, OSError) as error:
                self._set_exit(process, str(error))
                return
        self._failures = 0
        process.heard_at = self._clock()
        self._by_pid[process.pid] = process
        if process.pid in self._early_exits:
            self._set_exit(process, self._early_exits.pop(process.pid))
        elif process.kill_requested:
            self._forkserver.kill(process.pid, signal.SIGKILL)

    async def _follow(self, process: _Process) -> None:
        """Deliver a worker's messages, then its exit."""
        receiving = asyncio.create_task(self._receive(process))
        process.tasks.append(receiving)
        why = await process.exit
        await asyncio.wait([receiving], timeout=_DRAIN_S)
        receiving.cancel()
        process.channel.close()
        del self._processes[process.key]
        self._by_pid.pop(process.pid, None)
        self._listener.on_exit(process.key, why)

    async def _receive(self, process: _Process) -> None:
        while True:
            try:
                message, fds = await process.channel.receive()
            except Closed:
                return
            except CarpoolError as error:  # not a valid message
                self._listener.on_message(process.key, WorkerFailed("protocol", f"its worker sent {error}"))
                self.kill(process.key)
                return
            close_all(fds)
            process.heard_at = self._clock()
            self._listener.on_message(process.key, message)

    def _on_worker_exit(self, exited: Exited) -> None:
        if exited.pid in self._detached:
            self._detached.discard(exited.pid)
            return
        code = exited.code
        why = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        process = self._by_pid.get(exited.pid)
        if process is None:
            self._early_exits[exited.pid] = why
        else:
            self._set_exit(process, why)

    def _set_exit(self, process: _Process, why: str) -> None:
        if not process.exit.done():
            process.exit.set_result(why)

    def _on_forkserver_death(self, reason: str) -> None:
        log_event(_log, "forkserver_died", level=logging.WARNING, reason=reason)
        dead, self._forkserver = self._forkserver, None
        self._early_exits.clear()
        self._failures += 1
        self._restart = asyncio.create_task(self._replace(dead, reason))
        for process in self._processes.values():
            if process.pid:
                self._set_exit(process, f"the fork server died: {reason}")

    async def _begin(self, launched: Launched | None) -> None:
        try:
            await self.start(launched)
        except ForkServerDied as error:
            self._break(str(error))

    async def _replace(self, dead: ForkServer | None, reason: str) -> None:
        if dead is not None:
            await dead.stop()  # reaps it and frees its socket
        while self._failures <= _MAX_FAILURES:
            try:
                await self.start()
            except ForkServerDied as error:  # the cause may kill this one, too, before it can fork
                self._failures += 1
                reason = str(error)
            else:
                log_event(_log, "forkserver_restarted")
                return
        error_text = f"{self._failures} fork servers died in a row; the last one: {reason}"
        self._break(error_text)
        raise ForkServerDied(error_text)

    def _break(self, reason: str) -> None:
        log_event(_log, "forkserver_unavailable", level=logging.ERROR, reason=reason)
        if not self.broken.done():
            self.broken.set_result(reason)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
