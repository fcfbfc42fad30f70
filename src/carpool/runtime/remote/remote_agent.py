"""Agent of a machine: lets a scheduler on another one use this machine's executor and fetch its jobs' files.

It relays the lines of an unmodified executor, which runs in its own session and outlives the agent. One scheduler at a
time may use the executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool import __version__
from carpool.core.errors import InputError
from carpool.core.host_resources import HostResources
from carpool.jobs.devices import LocalDevice
from carpool.jobs.environment import daemon_environment
from carpool.logs import log_event
from carpool.runtime.executor.client import ExecutorSocket
from carpool.runtime.executor.client_protocol import json_line
from carpool.runtime.executor.job_guard import marked_job
from carpool.runtime.remote import remote_protocol as protocol
from carpool.runtime.remote.link_probe import answer_request, serve_probe
from carpool.runtime.remote.remote_files import CODE_REQUESTS, FileService
from carpool.runtime.remote.remote_protocol import RemoteRefused

_RELAY_BYTES = 1 << 16
_START_S = 180.0
_MAX_LINE_BYTES = 1 << 26
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The options of an agent."""

    state: Path
    devices: Sequence[LocalDevice]
    supplies: HostResources
    token: str
    drivers: str = ""
    certificate: bytes = b""  # in DER form, if connections are encrypted
    environment: Mapping[str, str] = field(default_factory=lambda: daemon_environment(os.environ))  # of the executor


class Agent:
    """Serves connections: each proves that it has the token, then relays the executor's lines or asks for files."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._socket = ExecutorSocket(options.state / "executor")
        self._files = FileService(options.state)
        self._code_files = FileService(options.state, CODE_REQUESTS)
        self._binding = sha256(options.certificate).digest() if options.certificate else b""
        self._owner = ""  # the scheduler that uses the executor
        self._relay: asyncio.StreamWriter | None = None  # its connection
        self._started: list[subprocess.Popen[bytes]] = []
        self._serving: set[asyncio.Task[None]] = set()

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername"))
        try:
            hello = await self._shake_hands(reader, writer)
            if hello["purpose"] == "executor":
                await self._relay_executor(hello, reader, writer)
            elif hello["purpose"] == "files":
                await self._serve_files(reader, writer)
            elif hello["purpose"] == "code":
                await _answer(self._code_files, reader, writer)
            elif hello["purpose"] == "workers":
                await self._relay_workers(hello, reader, writer)
            elif hello["purpose"] == "measure":
                await answer_request(hello, writer)
            elif hello["purpose"] == "probe":
                await serve_probe(reader, writer)
        except RemoteRefused as error:
            log_event(_log, "connection_refused", level=logging.WARNING, peer=peer, reason=str(error))
            with contextlib.suppress(ConnectionError):
                await protocol.send(writer, {"refused": str(error), "way_out": error.way_out})
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
        first = await protocol.greeting(reader)
        if first.get("carpool") != protocol.PROTOCOL:
            problem = f"protocol {first.get('carpool')!r}; this agent has protocol {protocol.PROTOCOL}"
            raise RemoteRefused(f"{problem} (carpool {__version__})", "Install the same carpool on all machines.")
        nonces = (str(first.get("nonce", "")), protocol.new_nonce())
        await protocol.send(writer, {"nonce": nonces[1]})
        hello = await protocol.greeting(reader)
        token = self._options.token
        if hello.get("purpose") in protocol.PEER_PURPOSES:
            token = protocol.peer_token(token)
        if not protocol.is_proof(hello.get("proof"), protocol.proof(token, "client", nonces, self._binding)):
            raise RemoteRefused("wrong token", "Check that token_file is the same on both machines.")
        self._refuse_stranger(hello)
        await protocol.send(
            writer, {"proof": protocol.proof(token, "agent", nonces, self._binding), **self._describe()}
        )
        return {"purpose": "", **hello}

    def _refuse_stranger(self, hello: Mapping[str, Any]) -> None:
        """Refuse a second scheduler while another one uses the executor."""
        if hello.get("purpose") == "executor" and self._relay is not None and hello.get("owner") != self._owner:
            problem = f"its executor is used by another scheduler ({self._owner})"
            raise RemoteRefused(problem, "Stop that one, or submit jobs to it.")

    def _describe(self) -> dict[str, Any]:
        options = self._options
        return {
            "devices": [asdict(device) for device in options.devices],
            "supplies": list(options.supplies),
            "versions": asdict(protocol.own_versions()),
            "state": str(options.state),
            "drivers": options.drivers,
            "is_running": self._socket.is_answered,
            "used_by": self._owner if self._relay is not None else "",
            "job_in_hand": marked_job(self._socket.job_marker) or "",
        }

    async def _serve_files(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _answer(self._files, reader, writer)

    async def _relay_workers(
        self, hello: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay between the lead of a job across machines and this machine's executor, until one of them ends."""
        end = self._socket.connect()
        if end is None:
            raise RemoteRefused("its executor is not running")
        executor = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
        address = writer.get_extra_info("sockname")[0]
        executor[1].write(json_line({"workers": str(hello.get("job", "")), "address": address}))
        copying = {
            asyncio.create_task(_copy(reader, executor[1])),
            asyncio.create_task(_copy(executor[0], writer)),
        }
        try:
            await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)
            executor[1].close()

    async def _relay_executor(
        self, hello: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay lines until scheduler or executor ends; a scheduler that asks for a fresh executor gets a new one."""
        if self._relay is not None:
            self._relay.close()
        self._relay, self._owner = writer, str(hello.get("owner", ""))
        try:
            end = self._fresh_end() if hello.get("fresh") and await self._clear() else self._socket.connect()
            if end is None:
                raise RemoteRefused("its executor is not running")
            executor = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
            heard = Heard(_START_S if hello.get("fresh") else 0.0)
            await self._relay_lines((reader, writer), executor, float(hello.get("lease_s", 0.0)), heard)
        finally:
            if self._relay is writer:
                self._relay = None

    async def _clear(self) -> bool:
        """Kill an executor whose scheduler will not return."""
        await self._socket.kill_executor()
        self._reap()
        return True

    def _fresh_end(self) -> socket.socket:
        end, process = self._socket.start_executor(self._options.environment)
        self._started.append(process)
        log_event(_log, "executor_started", pid=process.pid)
        return end

    def _reap(self) -> None:
        self._started = [process for process in self._started if process.poll() is None]

    async def _relay_lines(
        self,
        scheduler: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        executor: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        lease_s: float,
        heard: Heard,
    ) -> None:
        inwards = asyncio.create_task(_copy(scheduler[0], executor[1]))
        outwards = asyncio.create_task(_copy(executor[0], scheduler[1], heard))
        guard = asyncio.create_task(self._guard(heard, lease_s))
        try:
            await asyncio.wait({inwards, outwards, guard}, return_when=asyncio.FIRST_COMPLETED)
            if lease_s and not outwards.done():  # a live executor closes its end, too
                with contextlib.suppress(OSError):
                    executor[1].write_eof()
                await asyncio.wait({outwards, guard}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (inwards, outwards, guard):
                task.cancel()
            await asyncio.gather(inwards, outwards, guard, return_exceptions=True)
            executor[1].close()
            self._reap()

    async def _guard(self, heard: Heard, lease_s: float) -> None:
        """Kill an executor that sends no heartbeat for a lease: its workers would continue without it."""
        watched = self._socket.executor_pid
        if not lease_s:
            await asyncio.Event().wait()
        while (silent_s := time.monotonic() - heard.at) < lease_s:  # noqa: ASYNC110 - it waits for silence
            await asyncio.sleep(lease_s - silent_s)
        if watched is not None and self._socket.executor_pid == watched:  # and not an executor that has replaced it
            log_event(_log, "executor_killed", level=logging.WARNING, pid=watched, silent_s=round(silent_s, 1))
            await self._socket.kill_executor()

    async def close(self) -> None:
        """Stop the executor with checkpoints and cut all connections."""
        if (pid := self._socket.executor_pid) is not None:
            process = next((each for each in self._started if each.pid == pid), None)
            if process is not None:
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.wait)
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if not self._socket.is_answered:
            self._socket.remove()


class Heard:
    """When the executor was last heard; a new one first needs a while to import torch."""

    def __init__(self, start_s: float) -> None:
        self.at = time.monotonic() + start_s


async def _answer(files: FileService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while (request := await protocol.receive(reader)) is not None:
        await protocol.send(writer, *await files.answer(*request))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Heard | None = None) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while chunk := await reader.read(_RELAY_BYTES):
            if heard is not None:
                heard.at = time.monotonic()
            writer.write(chunk)
            await writer.drain()


async def serve_agent(listener: socket.socket, options: AgentOptions, context: ssl.SSLContext | None) -> None:
    """Serve until SIGTERM or SIGINT, then stop the executor with checkpoints."""
    agent = Agent(options)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = await asyncio.start_server(agent.on_connection, sock=listener, ssl=context, limit=_MAX_LINE_BYTES)
    async with server:
        await stopping.wait()
        server.close()
        await agent.close()


def certificate_of(path: Path) -> bytes:
    """The first certificate of a PEM file in DER form."""
    text = path.read_text(encoding="ascii", errors="replace")
    head, tail = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    if head not in text or tail not in text:
        raise InputError("has no certificate", where=str(path), way_out="Use a PEM file.")
    return ssl.PEM_cert_to_DER_cert(head + text.partition(head)[2].partition(tail)[0] + tail)
