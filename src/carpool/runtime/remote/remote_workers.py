"""Remote workers: the lead's side of workers that other machines run for its jobs.

It implements the part of the worker pool's interface that the executor needs. Descriptors do not cross machines: the
content of a memory file is sent instead, and comes back when a worker has written one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.core.model import JobId
from carpool.jobs.code_archive import absolute_paths
from carpool.jobs.devices import RemoteDevice
from carpool.jobs.hosts_file import Host
from carpool.jobs.program import Program
from carpool.runtime.process.channel import decode, encode
from carpool.runtime.process.protocol import Load, Message, Publish, WorkerFailed
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.remote.remote_files import code_of
from carpool.runtime.remote.remote_link import Connection, HostUnreachable, RemoteFiles, connect
from carpool.runtime.remote.remote_worker_stream import Frame, Peer, RemoteWorkerStream
from carpool.runtime.sharing.mps_admission import PendingWorker

_RETRY_S = 0.5
_REACH_S = 120.0  # if a peer that the scheduler counts as present cannot be reached for this long, the job fails
_COPY_BYTES = 1 << 24


class RemoteWorkerListener(Protocol):
    """Receives the events of remote workers."""

    def on_message(self, key: WorkerKey, message: Message) -> None: ...

    def on_exit(self, key: WorkerKey, why: str) -> None: ...

    def on_peer_lost(self, key: WorkerKey, why: str) -> None:
        """Called instead of `on_exit` when the connection to a worker's machine is lost."""

    def on_output(self, job: JobId, output: bytes) -> None:
        """Called with the log output of workers on other machines."""


@dataclass(slots=True, eq=False)
class _JobConnection:
    """The workers of one job on one machine, and the connection to it."""

    job: JobId
    peer: Peer
    stream: RemoteWorkerStream = field(default_factory=RemoteWorkerStream)
    workers: set[int] = field(default_factory=set)
    mirrors: dict[int, int] = field(default_factory=dict)  # worker to the memory file that it is to write
    address: str = ""  # of this machine, as the peer reaches it
    task: asyncio.Task[None] | None = None


class RemoteWorkers:
    """All workers that other machines run for this executor's jobs."""

    def __init__(
        self,
        listener: RemoteWorkerListener,
        state: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._state = state
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._connections: dict[tuple[JobId, str], _JobConnection] = {}
        self._is_closing = False
        self.devices: dict[int, RemoteDevice] = {}

    def introduce(self, peer: Peer) -> None:
        """Record how a machine is reached and which devices it has."""
        self._peers[peer.host.name] = peer
        self.devices = {number: each for number, each in self.devices.items() if each.host != peer.host.name}
        self.devices.update(peer.remote_devices)

    def owns(self, key: WorkerKey) -> bool:
        return self._find(key) is not None

    def start(self, worker: PendingWorker, program: Program) -> None:
        """Start a worker on its device's machine, retrying the connection as long as necessary."""
        job, number = JobId(worker.key[0]), worker.key[1]
        peer = self._peers[self.devices[worker.device].host]
        connection = self._connections.get((job, peer.host.name))
        if connection is None:
            connection = self._connections[job, peer.host.name] = _JobConnection(job, peer)
            connection.task = asyncio.create_task(self._run(connection, program))
        connection.workers.add(number)
        values = {"device": worker.device, "lane": worker.lane, "threads": worker.threads}
        connection.stream.send(do="start", worker=number, program=asdict(program), **values)

    def send(self, key: WorkerKey, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, with the content of its memory file; ignored if the worker has exited."""
        connection = self._find(key)
        if connection is None:
            return
        values: Frame = {"do": "send", "worker": key[1], "line": encode(message).decode()}
        if isinstance(message, Publish):
            self._forget_mirror(connection, key[1])
            connection.mirrors[key[1]] = os.dup(fds[0])
            connection.stream.send(**values)
        elif isinstance(message, Load) and message.path:
            self._send_checkpoint(connection, message.path, values)
        elif isinstance(message, Load) and fds:
            connection.stream.send_memory(fds[0], **values)
        else:
            connection.stream.send(**values)

    def _send_checkpoint(self, connection: _JobConnection, path: str, values: Frame) -> None:
        """Send a checkpoint with the message to load it; without it the worker reports that it is unusable."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            connection.stream.send(**values)
            return
        connection.stream.send_memory(fd, **values)
        os.close(fd)

    def kill(self, key: WorkerKey) -> None:
        """Kill a worker; its exit is reported as any other."""
        connection = self._find(key)
        if connection is not None and connection.address:
            connection.stream.send(do="kill", worker=key[1])
        elif connection is not None:  # not connected yet: nothing runs there
            asyncio.get_running_loop().call_soon(self._on_exit, connection, key[1], "it had not been started")

    def own_address(self, job: JobId) -> str:
        """This machine's address as the first peer with workers of a job reaches it."""
        return next(
            (
                connection.address
                for connection in self._connections.values()
                if connection.job == job and connection.address
            ),
            "",
        )

    async def close(self) -> None:
        """Cut all connections, which ends the workers."""
        self._is_closing = True
        tasks = [connection.task for connection in self._connections.values() if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, key: WorkerKey) -> _JobConnection | None:
        return next(
            (
                connection
                for connection in self._connections.values()
                if connection.job == key[0] and key[1] in connection.workers
            ),
            None,
        )

    async def _run(self, connection: _JobConnection, program: Program) -> None:
        name, is_given_up = connection.peer.host.name, False
        try:
            reader, writer, _ = await self._reach(connection, program)
            connection.address = writer.get_extra_info("sockname")[0]
            async for frame, memory in connection.stream.run(reader, writer):
                self._on_frame(connection, frame, memory)
                if not connection.workers:
                    return
        except (CarpoolError, OSError) as error:
            is_given_up = True
            reason = f"a worker cannot be started on {name}: {error}"
            for worker in sorted(connection.workers):
                self._listener.on_message((connection.job, worker), WorkerFailed("input", reason))
        finally:
            self._end(connection, "" if is_given_up else f"the connection to {name} was lost")

    async def _reach(self, connection: _JobConnection, program: Program) -> Connection:
        """Connect to a peer and send it the job's code; InputError if that can never work."""
        host, give_up_at = connection.peer.host, self._clock() + _REACH_S
        while True:
            try:
                await self._bring_code(host, connection.job, program)
                link = await connect(host, "workers", job=connection.job)
                if link.facts.is_running:
                    return link
                link.writer.close()
                problem: Exception = HostUnreachable("has no executor", where=f"host {host.name!r}")
            except (HostUnreachable, OSError) as error:
                problem = error
            if self._clock() > give_up_at:
                raise problem
            await asyncio.sleep(_RETRY_S)

    async def _bring_code(self, host: Host, job: JobId, program: Program) -> None:
        """Send the job's code unless the peer has it; InputError for a path that it lacks."""
        files, code = RemoteFiles(host, purpose="code"), code_of(self._state, job)
        try:
            paths = absolute_paths([*program.args.values(), *program.environment.values()])
            await files.require_paths(job, [*paths, *(code.links.values() if code is not None else ())])
            if code is not None:
                await files.put_code(code.digest, await asyncio.to_thread(code.archive.read_bytes))
                await files.unpack(job, code.digest, code.links)
        finally:
            files.close()

    def _on_frame(self, connection: _JobConnection, frame: Frame, memory: int | None) -> None:
        try:
            worker = int(frame.get("worker", 0))
            if memory is not None and worker in connection.mirrors:
                _copy_file(memory, connection.mirrors[worker])
                self._forget_mirror(connection, worker)
        finally:
            if memory is not None:
                os.close(memory)
        if "output" in frame:
            self._listener.on_output(connection.job, str(frame["output"]).encode("latin-1"))
        elif worker in connection.workers and "line" in frame:
            self._listener.on_message((connection.job, worker), decode(str(frame["line"]).encode()))
        elif worker in connection.workers and "exit" in frame:
            self._on_exit(connection, worker, str(frame["exit"]))

    def _on_exit(self, connection: _JobConnection, worker: int, why: str) -> None:
        if worker not in connection.workers:
            return
        connection.workers.discard(worker)
        self._forget_mirror(connection, worker)
        self._listener.on_exit((connection.job, worker), why)
        if not connection.workers and not connection.address and connection.task is not None:
            connection.task.cancel()  # it is still trying to connect, without workers

    def _end(self, connection: _JobConnection, lost: str) -> None:
        if self._connections.get((connection.job, connection.peer.host.name)) is connection:
            del self._connections[connection.job, connection.peer.host.name]
        workers, connection.workers = sorted(connection.workers), set()
        for worker in list(connection.mirrors):
            self._forget_mirror(connection, worker)
        for worker in () if self._is_closing else workers:
            if lost:
                self._listener.on_peer_lost((connection.job, worker), lost)
            else:
                self._listener.on_exit((connection.job, worker), "it had not been started")

    def _forget_mirror(self, connection: _JobConnection, worker: int) -> None:
        fd = connection.mirrors.pop(worker, None)
        if fd is not None:
            os.close(fd)


def _copy_file(source: int, target: int) -> None:
    """Replace the content of a memory file."""
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        at += os.pwrite(target, os.pread(source, _COPY_BYTES, at), at)
