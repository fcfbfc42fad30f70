"""Link probe: measures round-trip time and bandwidth between two machines, with few bytes and in little time.

The scheduler asks the agent of one machine to measure the link to another one. That agent connects to the other agent,
which opens a plain port for this one measurement: gradients travel outside TLS, too. Frames double in size until one
takes long enough to determine the bandwidth, so a slow link carries few bytes and a fast one about a second of traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ssl
import time
from collections.abc import Mapping
from typing import Any

from carpool.core.errors import InputError
from carpool.core.topology import Path
from carpool.jobs.hosts_file import Host
from carpool.runtime.remote import remote_protocol as protocol
from carpool.runtime.remote.remote_link import connect
from carpool.runtime.remote.remote_protocol import RemoteRefused

PROBE_S = 15.0  # for one measurement, handshakes included
_PINGS = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 14, 1 << 26  # of a frame, the last one about as large as all before
_ENOUGH_S = 0.2  # a frame that takes this long determines the bandwidth
_REPEATS = 2  # of that frame: the fastest counts, because the machines may be busy
_LENGTH_BYTES = 8
_CHUNK = bytes(1 << 18)


async def request_measurement(host: Host, peer: Host) -> Path | None:
    """Let a host's agent measure the link to another host; None if it cannot."""
    where = {"name": peer.name, "address": peer.address, "port": peer.port, "token": peer.token, "tls": peer.tls}
    try:
        async with asyncio.timeout(2 * PROBE_S):
            connection = await connect(host, "measure", peer=where)
            try:
                found = await protocol.receive(connection.reader)
            finally:
                connection.writer.close()
    except (InputError, RemoteRefused, OSError):
        return None
    if found is None or not found[0].get("bytes_per_s"):
        return None
    return Path(float(found[0]["bytes_per_s"]), float(found[0]["latency_s"]))


async def answer_request(hello: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
    """Measure the link that a scheduler asks for and send the result."""
    try:
        peer = hello["peer"]
        host = Host(
            str(peer["name"]), str(peer["address"]), int(peer["port"]), str(peer["token"]), tls=bool(peer["tls"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteRefused(f"a request to measure a link without its other end: {error!r}") from None
    try:
        async with asyncio.timeout(PROBE_S):
            path = await measure_link(host)
    except (InputError, OSError, asyncio.IncompleteReadError) as error:
        raise RemoteRefused(f"the link to host {host.name!r} cannot be measured: {str(error) or 'timeout'}") from None
    await protocol.send(writer, {"bytes_per_s": path.bytes_per_s, "latency_s": path.latency_s})


async def measure_link(host: Host) -> Path:
    """Measure the link from this machine to a host, with the host's token for peers."""
    connection = await connect(host, "probe")
    try:
        found = await protocol.receive(connection.reader)
        if found is None:
            raise ConnectionResetError("the other agent closed the connection")
        reader, writer = await asyncio.open_connection(host.address, int(found[0]["port"]))
        try:
            writer.write(str(found[0]["key"]).encode("ascii"))
            return await _measure(reader, writer)
        finally:
            writer.close()
    finally:
        connection.writer.close()


async def _measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Path:
    await _frame_s(reader, writer, 1)  # the connection is accepted
    round_trip_s = min([await _frame_s(reader, writer, 1) for _ in range(_PINGS)])
    size = _FIRST_BYTES
    while (seconds := await _frame_s(reader, writer, size)) < _ENOUGH_S + round_trip_s and size < _MOST_BYTES:
        size *= 2
    best_s = min(seconds, *[await _frame_s(reader, writer, size) for _ in range(_REPEATS)])
    return Path(size / max(best_s - round_trip_s, 1e-6), round_trip_s / 2.0)


async def _frame_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> float:
    """Seconds until a frame of `num_bytes` bytes is acknowledged."""
    began = time.perf_counter()
    writer.write(size.to_bytes(_LENGTH_BYTES, "big"))
    left = size
    while left:
        chunk = min(left, len(_CHUNK))
        writer.write(_CHUNK[:chunk])
        await writer.drain()
        left -= chunk
    await reader.readexactly(1)
    return time.perf_counter() - began


async def serve_probe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Open a port for one measurement, tell the other agent, and acknowledge its frames."""
    key = protocol.new_nonce()

    async def receive(probe: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            async with asyncio.timeout(PROBE_S):
                if hmac.compare_digest(await probe.readexactly(len(key)), key.encode("ascii")):
                    await _acknowledge_frames(probe, answers)
        answers.close()

    address = writer.get_extra_info("sockname")[0]
    server = await asyncio.start_server(receive, address, 0, limit=len(_CHUNK))
    async with server:
        await protocol.send(writer, {"port": server.sockets[0].getsockname()[1], "key": key})
        with contextlib.suppress(TimeoutError, ConnectionError, ssl.SSLError):
            async with asyncio.timeout(PROBE_S):
                await reader.read(1)  # wait until the other side closes its connection


async def _acknowledge_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.read(_LENGTH_BYTES):
        if len(head) < _LENGTH_BYTES:
            head += await reader.readexactly(_LENGTH_BYTES - len(head))
        left = int.from_bytes(head, "big")
        if left > _MOST_BYTES:
            return
        while left:
            chunk = await reader.read(min(left, len(_CHUNK)))
            if not chunk:
                return
            left -= len(chunk)
        writer.write(b"\1")
        await writer.drain()
