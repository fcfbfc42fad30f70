"""Devices of a federation: how orders reach them, and devices as processes of this machine, kept ready for rounds."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from carpool.backends.federation_lanes import FederationLanes
from carpool.core.errors import CarpoolError, InputError
from carpool.core.typed_fields import InvalidField, decode_fields, shown
from carpool.federated.federation import DeviceName
from carpool.federated.federation_file import FederatedDevice, FederationFile
from carpool.federated.messages import DeviceJoined, StartWork
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, Received, close_all, pair
from carpool.runtime.process.forkserver import ForkServer
from carpool.runtime.process.protocol import Alive, Halt, HostTasks, Message, RunTasks, TasksReady
from carpool.runtime.process.shared_memory import memory_file_of, read_memory_file

_log = logging.getLogger(__name__)
_MAX_RESTARTS = 3  # of a device without a report in between


NO_DEVICE = ""  # named by an event that concerns all devices


class Lost(NamedTuple):
    """A device no longer answers; `back` if another process has already taken its place."""

    reason: str
    back: DeviceJoined | None = None


Event = tuple[str, Received | DeviceJoined | Lost]  # the device, and its message or its change of state


class Devices(Protocol):
    """Carries orders to devices. Their answers, and devices that join or are lost, are put into `events`."""

    events: asyncio.Queue[Event]

    async def start(self) -> list[DeviceJoined]:
        """The devices that are ready; later ones follow as events."""

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        """Let a device work, from these weights of its tasks."""

    def halt(self, missing: Sequence[DeviceName]) -> None:
        """The cycle was closed without these devices."""

    @property
    def is_working(self) -> bool:
        """Whether an event is certain to follow without another order."""

    @property
    def may_join(self) -> bool:
        """Whether further devices can join."""

    async def close(self) -> None:
        """Release the devices."""


@dataclass(slots=True)
class HostedProcess:
    """A process that hosts tasks: a device, or the server that evaluates."""

    name: str
    channel: AsyncChannel
    reader: asyncio.Task[None] | None = None
    pid: int = 0
    is_working: bool = False
    is_halted: bool = False  # has been ordered to stop and has not answered yet
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


class NoLanes(CarpoolError):
    """The tasks of a device cannot run side by side on its GPU; the message says why."""


class LoadTimeout(InputError):
    """A process did not load its tasks in time."""


async def start_process(
    forks: ForkServer, host: HostTasks, folder: Path, load_s: float = 0.0
) -> tuple[HostedProcess, dict[str, Any], list[bytes]]:
    """Start a process that hosts tasks. Returns what it reports about them, from a server also their initial weights.

    `LoadTimeout` if that takes longer than ``load_s`` (0: no limit); the process is killed. `NoLanes` if it has to be
    started without lanes.
    """
    log = os.open(folder / f"{quote(host.name, safe='')}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    ours, theirs = pair()
    try:
        pid = await forks.fork(theirs, log)
    finally:
        theirs.close()
        os.close(log)
    process = HostedProcess(host.name, AsyncChannel(ours), pid=pid)
    process.channel.send(host)
    try:
        async with asyncio.timeout(load_s or None):
            received = await process.channel.receive()
            while isinstance(received.message, Alive):
                received = await process.channel.receive()
    except Closed:
        process.close()
        raise InputError(
            f"the process of {host.name} exited while it loaded its tasks", way_out=f"See {folder}/*.log."
        ) from None
    except TimeoutError:
        process.close()
        forks.kill(pid)
        raise LoadTimeout(
            f"{host.name} did not load its tasks within {load_s:g} s (load_s of the federation file)"
        ) from None
    ready = received.message
    assert isinstance(ready, TasksReady), f"expected TasksReady, got {ready}"
    weights = [read_memory_file(fd) for fd in received.fds]
    close_all(received.fds)
    if ready.no_lanes:
        process.close()
        raise NoLanes(ready.no_lanes)
    if ready.error:
        process.close()
        raise InputError(ready.error)
    return process, ready.tasks, weights


async def start_device(
    forks: ForkServer, file: FederationFile, device: FederatedDevice, lanes: FederationLanes, folder: Path
) -> tuple[HostedProcess, dict[str, Any]]:
    """Start the process of a device, on lanes if it may have them; what it says about its tasks."""
    async with lanes.loading(device):
        while True:
            host = host_message(file, device, lanes.environment(device))
            try:
                process, about, _ = await start_process(forks, host, folder, file.federation.load_s)
            except NoLanes as error:
                lanes.refuse(device, str(error))
            else:
                return process, about


def host_message(file: FederationFile, device: FederatedDevice, lane: Mapping[str, str]) -> HostTasks:
    """What the process of a device hosts; InputError if this machine has fewer cores than the device."""
    part = file.devices.index(device)
    return HostTasks(
        device.name,
        file.hosted_tasks(),
        part,
        len(file.devices),
        device.device,
        _cores_of(file, part),
        slowdown=device.slowdown,
        lane=lane,
    )


def run_message(order: StartWork) -> RunTasks:
    """An order as its device's process gets it."""
    return RunTasks(order.cycle, order.work, order.deadline_s, order.in_turn)


def _cores_of(file: FederationFile, part: int) -> tuple[int, ...]:
    """The cores of a CPU device: devices take the machine's cores in order, and share them once all are taken."""
    device, there = file.devices[part], sorted(os.sched_getaffinity(0))
    if device.device != "cpu":
        return ()
    if device.cores > len(there) and not device.slowdown:
        raise InputError(
            f"device {device.name!r} has cores = {device.cores}, and {len(there)} cores are here",
            way_out="Lower it, or emulate: slowdown = 1 for all devices counts CPU seconds.",
        )
    first = sum([before.cores for before in file.devices[:part] if before.device == "cpu"])
    return tuple([there[(first + place) % len(there)] for place in range(device.cores)])


def joined(device: FederatedDevice, about: Mapping[str, Any]) -> DeviceJoined:
    """The fact that a device is ready, from its report about its tasks; InvalidField if that is impossible."""
    try:
        volumes = {task: each["volume"] for task, each in about.items()}
        sample_s = {task: each["sample_s"] for task, each in about.items() if each["volume"]}
        load_s = {task: each["load_s"] for task, each in about.items() if "load_s" in each}
    except (KeyError, TypeError):
        raise InvalidField("DeviceDescribed", "tasks", f"is {shown(about)}; each has a volume and sample_s") from None
    given = {
        "device": device.name,
        "kind": device.device,
        "volumes": volumes,
        "sample_s": sample_s,
        "cores": device.cores,
        "load_s": load_s,
    }
    return decode_fields(DeviceJoined, given)


def send(channel: AsyncChannel, message: Message, files: Sequence[bytes]) -> None:
    """Send a message with files."""
    fds = [memory_file_of(data, "weights") for data in files]
    channel.send(message, fds)
    close_all(fds)


class EmbeddedDevices:
    """Devices as forked processes. One that exits is started again, and is back in the same round.

    A device that hangs does not hold up the others: while it loads its tasks again their events are passed on, and it
    counts as lost after ``load_s`` or when a cycle is closed without it. One that ignores two closings is killed.
    """

    def __init__(
        self, file: FederationFile, forks: ForkServer, folder: Path, lanes: FederationLanes | None = None
    ) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._file = file
        self._forks = forks
        self._folder = folder
        self._inner: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, HostedProcess] = {}
        self._devices = {device.name: device for device in file.devices}
        self._lanes = lanes or FederationLanes(file, file.devices)
        self._watcher: asyncio.Task[None] | None = None
        self._reloads: dict[str, asyncio.Task[None]] = {}
        self._reported: set[str] = set()  # devices that load again and were reported as lost

    async def start(self) -> list[DeviceJoined]:
        """Start all devices. One that does not load in time is left out if there are others."""
        await self._lanes.start()
        starts = [self._start(device) for device in self._file.devices]
        found = await asyncio.gather(*starts, return_exceptions=True)
        failed = [each for each in found if isinstance(each, BaseException)]
        ready = [each for each in found if isinstance(each, DeviceJoined)]
        fatal = [each for each in failed if not isinstance(each, LoadTimeout)]
        if fatal or not ready:
            raise (fatal or failed)[0]
        for error in failed:
            _log.warning("%s; the federation continues without it", error)
        self._watcher = asyncio.create_task(self._watch())
        return ready

    async def _start(self, device: FederatedDevice) -> DeviceJoined:
        process, about = await start_device(self._forks, self._file, device, self._lanes, self._folder)
        if old := self._processes.get(device.name):
            process.restarts = old.restarts + 1
            process.is_working = old.is_working  # until the event is delivered
        self._processes[device.name] = process
        process.listen(self._inner)
        return joined(device, about)

    async def _watch(self) -> None:
        """Pass events on; a process that exited is replaced first."""
        while True:
            name, event = await self._inner.get()
            process = self._processes[name]
            if isinstance(event, Lost):
                process.close()
                process.is_working = True
                self._reloads[name] = asyncio.create_task(self._replace(process, event))
                continue
            if isinstance(event, Received) and isinstance(event.message, TasksReady):
                self._lanes.refuse(self._devices[DeviceName(name)], event.message.no_lanes)  # it exits
                continue
            if isinstance(event, Received):
                process.is_working, process.is_halted, process.restarts = False, False, 0
            self.events.put_nowait((name, event))

    async def _replace(self, process: HostedProcess, lost: Lost) -> None:
        name = process.name
        if process.restarts < _MAX_RESTARTS:
            try:
                lost = lost._replace(back=await self._start(self._devices[DeviceName(name)]))
            except (CarpoolError, OSError) as error:  # for example, the disk is full
                lost = Lost(str(error))
        self._processes[name].is_working = False
        del self._reloads[name]
        if name not in self._reported:
            self.events.put_nowait((name, lost))
        elif lost.back is not None:
            self._reported.discard(name)
            self.events.put_nowait((name, lost.back))

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        process = self._processes[order.device]
        if order.device in self._reloads:
            return  # it gets the order again once it is back
        process.is_working = True
        send(process.channel, run_message(order), weights)

    def halt(self, missing: Sequence[DeviceName]) -> None:
        for name in missing:
            process = self._processes.get(name)
            if process is None:
                continue  # it has not loaded its tasks since the federation was resumed
            if name in self._reloads:
                if name not in self._reported:
                    self._reported.add(name)
                    self.events.put_nowait((name, Lost("still loading its tasks when the cycle was closed")))
            elif process.is_working and process.is_halted:
                self._forks.kill(process.pid)
            elif process.is_working:
                process.is_halted = True
                process.channel.send(Halt())

    @property
    def may_join(self) -> bool:
        return bool(self._reloads)

    @property
    def is_working(self) -> bool:
        return not self.events.empty() or any(process.is_working for process in self._processes.values())

    async def close(self) -> None:
        for task in (*self._reloads.values(), *([self._watcher] if self._watcher else [])):
            task.cancel()
        for process in self._processes.values():
            process.close()
        await self._lanes.stop()
