"""Remote worker host: runs workers on this machine for jobs that executors on other machines lead.

The lead decides everything; this side forks the processes and relays their channels. Workers exit with the connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carpool.jobs.program import Program
from carpool.logs import log_event
from carpool.runtime.executor.launcher import Launcher
from carpool.runtime.process.channel import decode, encode
from carpool.runtime.process.protocol import Alive, Message, Proceed, Publish, Published
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.process.worker_pool import WorkerKey, WorkerPool
from carpool.runtime.remote.remote_files import work_folder
from carpool.runtime.remote.remote_worker_stream import Frame, RemoteWorkerStream
from carpool.runtime.sharing.mps_admission import PendingWorker

_OUTPUT_BYTES = 1 << 16
_OUTPUT_S = (
    0.1  # between relays of a worker's output: a line of each step would cost as much as the step's own messages
)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _JobConnection:
    """One lead's connection and the workers it has here."""

    job: str
    address: str  # of this machine, as the lead reaches it
    stream: RemoteWorkerStream = field(default_factory=RemoteWorkerStream)
    keys: dict[int, WorkerKey] = field(default_factory=dict)  # by the lead's number
    mirrors: dict[int, int] = field(default_factory=dict)  # memory files that workers are to write
    task: asyncio.Task[Any] | None = None


@dataclass(slots=True, eq=False)
class _HostedWorker:
    """A worker, and the pipe that it writes its log to."""

    connection: _JobConnection
    number: int  # in the lead's state machine
    device: int
    output: int  # read end
    log: int  # write end, open until the worker has exited


class RemoteWorkerHost:
    """All workers that this executor runs for other executors; their keys have negative numbers."""

    def __init__(self, launcher: Launcher, pool: WorkerPool, state: Path, kill: Callable[[WorkerKey], None]) -> None:
        self._launcher = launcher
        self._pool = pool
        self._state = state
        self._kill = kill
        self._last = 0
        self._workers: dict[WorkerKey, _HostedWorker] = {}
        self._connections: set[_JobConnection] = set()

    async def serve(self, job: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a lead until it is gone; then its workers are killed."""
        connection = _JobConnection(job, address, task=asyncio.current_task())
        self._connections.add(connection)
        log_event(_log, "hosting_began", job=job)
        try:
            async for frame, memory in connection.stream.run(reader, writer):
                self._on_frame(connection, frame, memory)
        finally:
            self._connections.discard(connection)
            for key in list(connection.keys.values()):
                self._kill(key)
            for fd in connection.mirrors.values():
                os.close(fd)
            log_event(_log, "hosting_ended", job=job, workers=len(connection.keys))

    def end_all(self) -> None:
        """Kill all hosted workers: this machine's lease has ended, and its devices may count as lost."""
        for connection in self._connections:
            if connection.task is not None:
                connection.task.cancel()

    def on_message(self, key: WorkerKey, message: Message) -> bool:
        """Relay a message to the lead; False if it is not from a hosted worker."""
        worker = self._workers.get(key)
        if worker is None:
            return False
        connection, number = worker.connection, worker.number
        frame = {"worker": number, "line": encode(message).decode()}
        if isinstance(message, Published) and number in connection.mirrors:
            mirror = connection.mirrors.pop(number)
            connection.stream.send_memory(mirror, **frame)
            os.close(mirror)
        elif not isinstance(message, Alive):
            connection.stream.send(**frame)
        return True

    def on_exit(self, key: WorkerKey, why: str) -> bool:
        """Report an exit to the lead; False if it is not of a hosted worker."""
        worker = self._workers.get(key)
        if worker is None:
            return False
        connection, number = worker.connection, worker.number
        os.close(worker.log)
        while self._relay_output(key):
            pass
        asyncio.get_running_loop().remove_reader(worker.output)
        os.close(worker.output)
        del self._workers[key]
        connection.keys.pop(number, None)
        if (mirror := connection.mirrors.pop(number, None)) is not None:
            os.close(mirror)
        self._launcher.on_hosted_exit(worker.device, key)
        connection.stream.send(worker=number, exit=why)
        return True

    def on_hang(self, key: WorkerKey) -> bool:
        """Kill a hosted worker without a heartbeat; False if it is not one."""
        if key not in self._workers:
            return False
        self._kill(key)
        return True

    def _on_frame(self, connection: _JobConnection, frame: Frame, memory: int | None) -> None:
        try:
            number = int(frame["worker"])
            if frame["do"] == "start":
                self._start(connection, number, frame)
            elif number in connection.keys and frame["do"] == "kill":
                self._kill(connection.keys[number])
            elif number in connection.keys and frame["do"] == "send":
                self._send(connection, number, decode(str(frame["line"]).encode()), memory)
        finally:
            if memory is not None:
                os.close(memory)

    def _start(self, connection: _JobConnection, number: int, frame: Mapping[str, Any]) -> None:
        self._last += 1
        key, device = (connection.job, -self._last), int(frame["device"])
        output, log = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(output, False)
        connection.keys[number] = key
        self._workers[key] = _HostedWorker(connection, number, device, output, log)
        asyncio.get_running_loop().add_reader(output, self._on_output, key)
        program, folder = Program.from_json(frame["program"]), work_folder(self._state, connection.job)
        if program.folder and folder.is_dir():
            program = replace(program, folder=str(folder))
        worker = PendingWorker(key, device, int(frame["lane"]), int(frame["threads"]))
        self._launcher.start_hosted(worker, program, log)

    def _send(self, connection: _JobConnection, number: int, message: Message, memory: int | None) -> None:
        fds = () if memory is None else (memory,)
        if isinstance(message, Publish):
            fds = (self._new_mirror(connection, number),)
        elif isinstance(message, Proceed) and message.store:
            message = replace(message, address=connection.address)
        self._pool.send(connection.keys[number], message, fds)

    def _new_mirror(self, connection: _JobConnection, number: int) -> int:
        if (before := connection.mirrors.pop(number, None)) is not None:
            os.close(before)
        connection.mirrors[number] = fd = new_memory_file("mirror-remote")
        return fd

    def _on_output(self, key: WorkerKey) -> None:
        """Relay a worker's output, and further output after a moment."""
        if not self._relay_output(key):
            return
        loop, worker = asyncio.get_running_loop(), self._workers[key]
        loop.remove_reader(worker.output)
        loop.call_later(_OUTPUT_S, self._resume_output, key)

    def _resume_output(self, key: WorkerKey) -> None:
        if (worker := self._workers.get(key)) is not None:
            asyncio.get_running_loop().add_reader(worker.output, self._on_output, key)

    def _relay_output(self, key: WorkerKey) -> bool:
        """Relay what a worker has written to its log. Returns whether there was anything."""
        worker = self._workers[key]
        try:
            content = os.read(worker.output, _OUTPUT_BYTES)
        except BlockingIOError:
            return False
        if content:
            worker.connection.stream.send(output=content.decode("latin-1"))  # latin-1 maps every byte to a character
        return bool(content)
