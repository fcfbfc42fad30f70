"""Remote worker stream: connects the executor that leads a job across machines to one that runs workers for it.

The lead opens one connection per job and peer, through the peer's agent, which relays it to its executor. Both sides
send frames in order: messages of workers as their lines, memory files in chunks ahead of the message they belong to,
and heartbeats. A side that receives nothing for `SILENCE_S` counts the other one as lost: the peer kills the lead's
workers, the lead counts them as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.jobs.devices import LocalDevice, RemoteDevice
from carpool.jobs.hosts_file import Host
from carpool.runtime.process.channel import MAX_MESSAGE_BYTES
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.remote import remote_protocol as protocol
from carpool.runtime.remote.remote_protocol import RemoteRefused

SILENCE_S = 10.0
_ALIVE_S = 1.0

Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A machine that runs workers for others: its agent with the token for peers, its devices by cluster number."""

    host: Host
    devices: tuple[LocalDevice, ...]

    @property
    def remote_devices(self) -> dict[int, RemoteDevice]:
        """Its devices by number, under names that include the machine's."""
        return {
            device.id: RemoteDevice(
                device.id,
                f"{self.host.name}/{device.name}",
                device.kind,
                device.cores,
                device.cuda,
                device.memory_bytes,
                device.lane_percent,
                self.host.name,
            )
            for device in self.devices
        }


def peer_to_json(peer: Peer) -> Frame:
    """A peer as plain JSON values."""
    host = peer.host
    devices = [[d.id, d.name, d.kind, list(d.cores), d.cuda, d.memory_bytes, d.lane_percent] for d in peer.devices]
    return {
        "name": host.name,
        "address": host.address,
        "port": host.port,
        "token": host.token,
        "tls": host.tls,
        "devices": devices,
    }


def peer_from_json(value: Mapping[str, Any]) -> Peer:
    """The inverse of `peer_to_json`."""
    devices = tuple(
        LocalDevice(number, name, kind, tuple(cores), *others)
        for number, name, kind, cores, *others in value["devices"]
    )
    return Peer(Host(value["name"], value["address"], value["port"], value["token"], tls=value["tls"]), devices)


class RemoteWorkerStream:
    """One end of a connection between a lead and a peer; frames sent before `run` wait for it."""

    def __init__(self) -> None:
        self._outgoing: asyncio.Queue[tuple[Frame, int | None]] = asyncio.Queue()

    def send(self, **frame: object) -> None:
        self._outgoing.put_nowait((frame, None))

    def send_memory(self, fd: int, **frame: object) -> None:
        """Send a file's content and then a frame; the descriptor may be closed when this returns."""
        self._outgoing.put_nowait((frame, os.dup(fd)))

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float = SILENCE_S
    ) -> AsyncIterator[tuple[Frame, int | None]]:
        """The frames of the other side, each with the memory file sent ahead of it; ends when that side is gone.

        A memory file belongs to the receiver.
        """
        sending = asyncio.create_task(self._send_all(writer))
        memory: int | None = None
        try:
            while (found := await _next_frame(reader, silence_s)) is not None:
                frame, payload = found
                if "at" in frame:
                    memory = _write_chunk(memory, frame, payload)
                elif frame:
                    taken, memory = memory, None
                    yield frame, taken
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            if memory is not None:
                os.close(memory)
            self._drop_outgoing()
            writer.close()

    async def _send_all(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while True:
                try:
                    async with asyncio.timeout(_ALIVE_S):
                        frame, fd = await self._outgoing.get()
                except TimeoutError:
                    await protocol.send(writer, {})
                    continue
                if fd is not None:
                    await _send_content(writer, fd)
                await protocol.send(writer, frame)

    def _drop_outgoing(self) -> None:
        while not self._outgoing.empty():
            _, fd = self._outgoing.get_nowait()
            if fd is not None:
                os.close(fd)


async def _send_content(writer: asyncio.StreamWriter, fd: int) -> None:
    try:
        at, size = 0, os.fstat(fd).st_size
        while at < size or not at:
            chunk = os.pread(fd, protocol.CHUNK_BYTES, at)
            await protocol.send(writer, {"at": at, "size": size}, chunk)
            at += len(chunk)
            if not chunk:
                return
    finally:
        os.close(fd)


async def _next_frame(reader: asyncio.StreamReader, silence_s: float) -> tuple[Frame, bytes] | None:
    try:
        async with asyncio.timeout(silence_s):
            return await protocol.receive(reader, 2 * MAX_MESSAGE_BYTES)
    except (TimeoutError, RemoteRefused, ssl.SSLError):
        return None


def _write_chunk(memory: int | None, frame: Frame, payload: bytes) -> int:
    fd = new_memory_file("remote", frame["size"]) if memory is None else memory
    os.pwrite(fd, payload, frame["at"])
    return fd
