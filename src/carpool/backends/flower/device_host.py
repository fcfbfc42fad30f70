"""Resident device of a federation over Flower: its tasks stay loaded while Flower starts a process per message."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from carpool.backends.federation_devices import Event, HostedProcess, Lost, start_device
from carpool.backends.federation_lanes import FederationLanes
from carpool.backends.flower.socket_file import listen
from carpool.core.errors import CarpoolError
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, Received, close_all
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import DescribeDevice, DeviceDescribed, Halt, RunTasks, TasksReady


class DeviceHost:
    """Serves one device on a Unix socket: a connection per message, one message at a time.

    A caller that leaves (its SuperNode was killed) halts its work, and so does the deadline of an order with its grace
    time. A process that does not stop within another grace time is killed. One that exits is started again for the next
    message; the current one is answered with why it failed.
    """

    def __init__(self, file: FederationFile, device: FederatedDevice, forks: ForkServer, folder: Path) -> None:
        self._file = file
        self._device = device
        self._forks = forks
        self._folder = folder
        self._lanes = FederationLanes(file, [device])
        self._private = tempfile.TemporaryDirectory(prefix="carpool-")  # mode 0700, and a short path
        self.path = str(Path(self._private.name) / "device")
        self._answers: asyncio.Queue[Event] = asyncio.Queue()
        self._process: HostedProcess | None = None
        self._turn = asyncio.Lock()
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the tasks and listen; InputError if a task cannot be loaded."""
        await self._lanes.start()
        await self._load()
        self._listener = listen(self.path)
        self._start(self._accept())

    async def close(self) -> None:
        """Release the device."""
        for task in self._serving:
            task.cancel()
        if self._process is not None:
            self._process.close()
        with contextlib.suppress(AttributeError):
            self._listener.close()
        self._private.cleanup()
        await self._lanes.stop()

    async def _load(self) -> HostedProcess:
        self._process, self._about = await start_device(
            self._forks, self._file, self._device, self._lanes, self._folder
        )
        self._answers = asyncio.Queue()
        self._process.listen(self._answers)
        return self._process

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            self._start(self._serve(AsyncChannel(connection)))

    async def _serve(self, channel: AsyncChannel) -> None:
        try:
            received = await channel.receive()
            async with self._turn:
                await self._answer(channel, received)
            close_all(received.fds)
            await channel.receive()  # until the caller has read the answer
        except (Closed, ProtocolError):
            pass
        finally:
            channel.close()

    async def _answer(self, channel: AsyncChannel, received: Received) -> None:
        try:
            process = await self._living()
        except CarpoolError as error:
            channel.send(TasksReady(error=str(error)))
            return
        match received.message:
            case DescribeDevice():
                channel.send(DeviceDescribed(self._device.name, self._about, self._file.fingerprint))
            case RunTasks() as run:
                await self._run(process, channel, run, received.fds)

    async def _living(self) -> HostedProcess:
        """The process, started again if it has exited."""
        while not self._answers.empty():
            _, event = self._answers.get_nowait()
            if isinstance(event, Received):
                close_all(event.fds)
            elif self._process is not None:
                self._process.close()
                self._process = None
        return self._process or await self._load()

    async def _run(self, process: HostedProcess, channel: AsyncChannel, run: RunTasks, fds: Sequence[int]) -> None:
        process.channel.send(run, fds)
        answer = asyncio.ensure_future(self._answers.get())
        leaving = asyncio.ensure_future(channel.receive())
        limit_s = self._limit_s(run)
        await asyncio.wait((answer, leaving), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            process.channel.send(Halt())
            await asyncio.wait((answer,), timeout=limit_s)
        is_killed = not answer.done()
        if is_killed:
            self._forks.kill(process.pid)
        _, event = await answer
        leaving.cancel()
        match event:
            case Received(TasksReady(no_lanes=reason)):  # its process exits, and is started without lanes
                self._lanes.refuse(self._device, reason)
            case Received(message, files):
                channel.send(message, files)
                close_all(files)
                return
            case _:
                self._answers.put_nowait((self._device.name, event))  # for `_living`
                reason = event.reason if isinstance(event, Lost) else "unexpected answer"
        channel.send(TasksReady(error="it did not stop at its deadline and was killed" if is_killed else reason))

    def _limit_s(self, run: RunTasks) -> float | None:
        """Seconds until an order has to be answered; None: no deadline, or one in emulated time."""
        if not run.deadline_s or self._file.is_emulated:
            return None
        return run.deadline_s + self._file.federation.grace_s
