"""Devices of a federation that are Flower nodes, reached through a ServerApp that relays."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from carpool.backends.federation_devices import NO_DEVICE, Event, Lost, joined, run_message, send
from carpool.backends.flower.socket_file import listen
from carpool.core.errors import CarpoolError, InputError
from carpool.core.typed_fields import InvalidField
from carpool.federated.federation import DeviceName
from carpool.federated.federation_file import FederationFile
from carpool.federated.messages import DeviceJoined, StartWork
from carpool.runtime.process.channel import AsyncChannel, Closed, ProtocolError, Received, close_all, decode, encode
from carpool.runtime.process.protocol import (
    DescribeDevice,
    DeviceDescribed,
    Message,
    NodeAnswered,
    NodesListed,
    SendToNode,
    TasksDone,
    TasksReady,
)

_log = logging.getLogger(__name__)
_RETRY_S = 1.0  # until a node that failed is asked for its name again


class Timing(NamedTuple):
    """Wall-clock times of one message to a device and back, and the seconds the device says it worked."""

    cycle: int
    device: str
    stamps: dict[str, float]
    device_s: float


class FlowerDevices:
    """Maps Flower nodes to devices and keeps the orders of each.

    A node that is new is asked which device it is. One that is killed stays listed for longer than a round may last, so
    that a device counts as lost when a cycle is closed without it, until it answers again.
    """

    def __init__(self, file: FederationFile, *, wait_s: float = 120.0) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.timings: list[Timing] = []
        self._file = file
        self._wait_s = wait_s
        self._private = tempfile.TemporaryDirectory(prefix="carpool-")  # mode 0700, and a short path
        self.path = str(Path(self._private.name) / "federation")
        self._listener = listen(self.path)
        self._channel: AsyncChannel | None = None
        self._names: dict[str, str | None] = {}  # of listed nodes; None: not known yet
        self._nodes: dict[str, str] = {}  # of connected devices
        self._working: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> list[DeviceJoined]:
        """Wait for the ServerApp and for all devices of the file; after a time for `min_devices` only."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = await asyncio.wait_for(loop.sock_accept(self._listener), self._wait_s)
        except TimeoutError:
            raise InputError(
                f"Flower started no ServerApp within {self._wait_s:g} s", way_out="See superlink.log, or `flwr log`."
            ) from None
        self._channel = AsyncChannel(connection)
        self._tasks.append(asyncio.create_task(self._listen(self._channel)))
        ready: dict[str, DeviceJoined] = {}
        ends = loop.time() + self._wait_s
        while len(ready) < len(self._file.devices):
            try:
                name, event = await asyncio.wait_for(self.events.get(), max(ends - loop.time(), 0.0))
            except TimeoutError:
                if len(ready) >= self._file.federation.min_devices:
                    break
                ends = loop.time() + self._wait_s
                _log.warning("waiting for devices: %d of %d have joined", len(ready), len(self._file.devices))
                continue
            if isinstance(event, DeviceJoined):
                ready[name] = event
            elif isinstance(event, Lost):
                ready.pop(name, None)
                if name == NO_DEVICE:
                    raise InputError(event.reason)
        return [ready[device.name] for device in self._file.devices if device.name in ready]

    def run(self, order: StartWork, weights: Sequence[bytes]) -> None:
        node = self._nodes.get(order.device)
        if node is None:
            self.events.put_nowait((order.device, Lost("its SuperNode is not connected")))
            return
        self._working.add(order.device)
        self._send(node, run_message(order), weights)

    def halt(self, missing: Sequence[DeviceName]) -> None:
        for name in missing:
            if name in self._working:
                self._lose(name, "no answer by the deadline")
                if node := self._nodes.pop(name, None):
                    self._send(node, DescribeDevice())

    @property
    def is_working(self) -> bool:
        return bool(self._working) or not self.events.empty()

    @property
    def may_join(self) -> bool:
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()  # the ServerApp ends
        self._listener.close()
        self._private.cleanup()

    def _send(self, node: str, message: Message, files: Sequence[bytes] = ()) -> None:
        assert self._channel is not None
        send(self._channel, SendToNode(node, json.loads(encode(message))), files)

    async def _listen(self, channel: AsyncChannel) -> None:
        try:
            while True:
                received = await channel.receive()
                match received.message:
                    case NodesListed(nodes):
                        self._on_listed(nodes)
                    case NodeAnswered() as answered:
                        self._on_answer(answered, received.fds)
        except CarpoolError as error:
            reason = "the ServerApp ended" if isinstance(error, Closed) else str(error)
            why = f"the connection to Flower is lost: {reason}; see superlink.log, or `flwr log`"
            self.events.put_nowait((NO_DEVICE, Lost(why)))

    def _on_listed(self, nodes: Sequence[str]) -> None:
        for node in self._names.keys() - set(nodes):
            name = self._names.pop(node)
            if name is not None and self._nodes.get(name) == node:
                del self._nodes[name]
                self._lose(name, "its SuperNode is gone")
        for node in nodes:
            if node not in self._names:
                self._names[node] = None
                self._send(node, DescribeDevice())

    def _on_answer(self, answered: NodeAnswered, fds: tuple[int, ...]) -> None:
        if answered.error:
            self._on_failed(answered.node, answered.error)
            return
        try:
            message = decode(json.dumps(answered.message).encode())
        except ProtocolError as error:
            self._on_failed(answered.node, str(error))
            close_all(fds)
            return
        match message:
            case DeviceDescribed() as described:
                self._on_described(answered.node, described)
            case TasksDone() as done if name := self._names.get(answered.node):
                self._working.discard(name)
                self.timings.append(Timing(done.cycle, name, dict(answered.stamps), done.seconds))
                self.events.put_nowait((name, Received(done, fds)))
                return
            case TasksReady(error=problem):
                self._on_failed(answered.node, problem)
        close_all(fds)

    def _on_failed(self, node: str, error: str) -> None:
        """A node could not work: its device is lost until the node has given its name again."""
        name = self._names.get(node)
        if node not in self._names:
            return
        if name is not None:
            self._names[node] = None
            self._nodes.pop(name, None)
            self._lose(name, error)
        _log.warning("node %s%s: %s", node, f" ({name})" if name else "", error)
        self._tasks.append(asyncio.create_task(self._ask_later(node)))

    async def _ask_later(self, node: str) -> None:
        await asyncio.sleep(_RETRY_S)
        if self._names.get(node, "") is None:
            self._send(node, DescribeDevice())

    def _on_described(self, node: str, described: DeviceDescribed) -> None:
        devices = {str(device.name): device for device in self._file.devices}
        device = devices.get(described.name)
        if device is None or described.fingerprint != self._file.fingerprint or node not in self._names:
            why = "not a device of this federation" if device is None else "it has another federation file"
            _log.warning("node %s (%s) does not take part: %s", node, described.name, why)
            return
        try:
            fact = joined(device, described.tasks)
        except InvalidField as error:
            _log.warning("node %s (%s) does not take part: %s", node, described.name, error)
            return
        before = self._nodes.get(device.name)
        if before == node:
            return
        if before is not None:
            self._names[before] = None
            self._lose(device.name, "its SuperNode was started again")
        self._names[node], self._nodes[device.name] = device.name, node
        self.events.put_nowait((device.name, fact))

    def _lose(self, name: str, reason: str) -> None:
        self._working.discard(name)
        self.events.put_nowait((name, Lost(reason)))
