"""Devices of a federation: how orders reach them, and devices as processes of this machine, kept ready for rounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from carpool.core.errors import CarpoolError, InputError
from carpool.core.model import Kind
from carpool.federated.federation import DeviceName
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.federated.messages import DeviceJoined, StartWork
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, Received, close_all, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import Alive, Halt, HostTasks, Message, RunTasks, TasksReady
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file

_MAX_RESTARTS = 3  # of a device without a report in between


NO_DEVICE = ""  # named by an event that concerns all devices


class Lost(NamedTuple):
    """A device does not answer any more; `back` if another process has taken its place already."""

    reason: str
    back: DeviceJoined | None = None


Event = tuple[str, Received | DeviceJoined | Lost]  # the device, and its message or what became of it


class Devices(Protocol):
    """Carries orders to devices. What they answer, and what becomes of them, is put into `events`."""

    events: asyncio.Queue[Event]

    async def start(self) -> list[DeviceJoined]:
        """The devices that are ready; later ones follow as events."""

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        """Let a device work, from these weights of its tasks."""

    def halt(self, missing: Sequence[DeviceName]) -> None:
        """The cycle was closed without these devices."""

    @property
    def is_working(self) -> bool:
        """Whether an event is sure to follow without another order."""

    @property
    def may_join(self) -> bool:
        """Whether devices can come that are not there yet."""

    async def close(self) -> None:
        """Let the devices go."""


@dataclass(slots=True)
class HostedProcess:
    """A process that hosts tasks: a device, or the server that evaluates."""

    name: str
    channel: AsyncChannel
    reader: asyncio.Task[None] | None = None
    is_working: bool = False
    restarts: int = 0

    def listen(self, events: asyncio.Queue[Event]) -> None:
        """Put its messages into `events` from now on."""
        self.reader = asyncio.create_task(self._listen(events))

    async def _listen(self, events: asyncio.Queue[Event]) -> None:
        try:
            while True:
                received = await self.channel.receive()
                if not isinstance(received.message, Alive):
                    events.put_nowait((self.name, received))
        except (Closed, ProtocolError):
            events.put_nowait((self.name, Lost("its process exited")))

    def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
        self.channel.close()  # the process exits


async def start_process(
    forks: ForkServer, host: HostTasks, folder: Path
) -> tuple[HostedProcess, dict[str, Any], list[bytes]]:
    """Start a process that hosts tasks; what it says about them, and of a server their initial weights."""
    ours, theirs = pair()
    log = os.open(folder / f"{quote(host.name, safe='')}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        await forks.fork(theirs, log)
    finally:
        theirs.close()
        os.close(log)
    process = HostedProcess(host.name, AsyncChannel(ours))
    process.channel.send(host)
    try:
        received = await process.channel.receive()
        while isinstance(received.message, Alive):
            received = await process.channel.receive()
    except Closed:
        raise CarpoolError(f"the process of {host.name} exited while it loaded its tasks") from None
    ready = received.message
    assert isinstance(ready, TasksReady), f"expected TasksReady, got {ready}"
    weights = [read_memory_file(fd) for fd in received.fds]
    close_all(received.fds)
    if ready.error:
        process.close()
        raise InputError(ready.error)
    return process, ready.tasks, weights


def host_message(file: FederationFile, device: FederatedDevice) -> HostTasks:
    """What the process of a device hosts."""
    cores, part = sorted(os.sched_getaffinity(0)), file.devices.index(device)
    own = (cores[part % len(cores)],) if device.device == "cpu" else ()
    return HostTasks(
        device.name, file.hosted_tasks(), part, len(file.devices), device.device, own, slowdown=device.slowdown
    )


def joined(device: FederatedDevice, about: dict[str, Any]) -> DeviceJoined:
    """The fact that a device is ready, from what its process says about its tasks."""
    volumes = {task: int(each["volume"]) for task, each in about.items()}
    sample_s = {task: float(each["sample_s"]) for task, each in about.items() if each["volume"]}
    return DeviceJoined(device.name, Kind(device.device), volumes, sample_s)


def send(channel: AsyncChannel, message: Message, files: Sequence[bytes]) -> None:
    """Send a message with files."""
    fds = [memory_file_of(data, "weights") for data in files]
    channel.send(message, fds)
    close_all(fds)


class EmbeddedDevices:
    """Devices as forked processes. One that exits is started again, and is back in the same round."""

    def __init__(self, file: FederationFile, forks: ForkServer, folder: Path) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._file = file
        self._forks = forks
        self._folder = folder
        self._inner: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, HostedProcess] = {}
        self._devices = {device.name: device for device in file.devices}
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> list[DeviceJoined]:
        found = await asyncio.gather(*[self._start(device) for device in self._file.devices])
        self._watcher = asyncio.create_task(self._watch())
        return found

    async def _start(self, device: FederatedDevice) -> DeviceJoined:
        process, about, _ = await start_process(self._forks, host_message(self._file, device), self._folder)
        if old := self._processes.get(device.name):
            process.restarts = old.restarts + 1
            process.is_working = old.is_working  # until the event says so
        self._processes[device.name] = process
        process.listen(self._inner)
        return joined(device, about)

    async def _watch(self) -> None:
        """Pass events on; replace a process that exited first."""
        while True:
            name, event = await self._inner.get()
            process = self._processes[name]
            if isinstance(event, Received):
                process.is_working, process.restarts = False, 0
            elif isinstance(event, Lost):
                event = await self._replace(process, event)
                self._processes[name].is_working = False
            self.events.put_nowait((name, event))

    async def _replace(self, process: HostedProcess, lost: Lost) -> Lost:
        process.close()
        process.is_working = True
        if process.restarts >= _MAX_RESTARTS:
            return lost
        try:
            return lost._replace(back=await self._start(self._devices[DeviceName(process.name)]))
        except CarpoolError as error:
            return Lost(str(error))

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        process = self._processes[order.device]
        process.is_working = True
        send(process.channel, RunTasks(order.cycle, order.work, order.deadline_s), weights)

    def halt(self, missing: Sequence[DeviceName]) -> None:
        for name in missing:
            if self._processes[name].is_working:
                self._processes[name].channel.send(Halt())

    @property
    def may_join(self) -> bool:
        return False

    @property
    def is_working(self) -> bool:
        return not self.events.empty() or any(process.is_working for process in self._processes.values())

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for process in self._processes.values():
            process.close()
