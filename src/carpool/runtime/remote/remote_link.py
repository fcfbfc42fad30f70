"""Connection to the agent of another machine: TLS, handshake, claims of its executor, and its files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from carpool.core.errors import CarpoolError, InputError
from carpool.core.host_resources import HostResources
from carpool.jobs.devices import LocalDevice
from carpool.jobs.hosts_file import Host
from carpool.jobs.nvml import Nvml
from carpool.jobs.untrusted_file import open_untrusted
from carpool.runtime.executor.client_protocol import devices_from_json
from carpool.runtime.remote import remote_protocol as protocol
from carpool.runtime.remote.remote_protocol import HandshakeBroken, RemoteRefused, Versions

_CONNECT_S = 10.0
_REQUEST_S = 30.0  # for at most one chunk
_MAX_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """An agent's report about its machine."""

    devices: tuple[LocalDevice, ...]
    supplies: HostResources
    versions: Versions
    state: Path  # folder of its jobs' folders, there
    drivers: str
    is_running: bool  # an executor is running
    job_in_hand: str = ""  # the job that its executor is handling, or was handling when it died
    used_by: str = ""  # the scheduler that is connected to its executor


class HostUnreachable(InputError):
    """No connection to a host's agent; it may come back."""


class Connection(NamedTuple):
    """An authenticated connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    facts: AgentFacts


async def connect(host: Host, purpose: str, **hello: object) -> Connection:
    """Connect to a host's agent for one purpose; InputError for a wrong address, token or version."""
    where = f"host {host.name!r} ({host.address}:{host.port})"
    context = _context() if host.tls else None
    try:
        opening = asyncio.open_connection(host.address, host.port, ssl=context, limit=_MAX_LINE_BYTES)
        reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
    except ssl.SSLError as error:
        way_out = "Start the agent with --tls-cert and --tls-key, or set tls = false for a loopback address."
        raise InputError(f"TLS failed: {error.reason or error}", where=where, way_out=way_out) from None
    except (OSError, TimeoutError) as error:
        way_out = "Check address and port, and that carpool agent runs there."
        raise HostUnreachable(f"cannot be reached: {str(error) or 'timeout'}", where=where, way_out=way_out) from None
    try:
        return Connection(reader, writer, await _shake_hands(reader, writer, host, {"purpose": purpose, **hello}))
    except (HandshakeBroken, ConnectionError) as error:
        writer.close()
        way_out = "Check that this is the port of a carpool agent, with or without TLS as tls says."
        raise HostUnreachable(str(error), where=where, way_out=way_out) from None
    except RemoteRefused as error:
        writer.close()
        way_out = error.way_out or (
            "Check that token_file and the version of carpool are the same on both machines, and the agent's port."
        )
        raise InputError(f"refused: {error}", where=where, way_out=way_out) from None
    except BaseException:
        writer.close()
        raise


def _context() -> ssl.SSLContext:
    """Accept any certificate: the handshake proves that it belongs to the agent with the token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: Host, hello: Mapping[str, object]
) -> AgentFacts:
    encrypted = writer.get_extra_info("ssl_object")
    binding = sha256(encrypted.getpeercert(binary_form=True)).digest() if encrypted is not None else b""
    nonce = protocol.new_nonce()
    await protocol.send(writer, {"carpool": protocol.PROTOCOL, "nonce": nonce})
    challenge = await protocol.greeting(reader)
    nonces = (nonce, str(challenge.get("nonce", "")))
    await protocol.send(writer, {"proof": protocol.proof(host.token, "client", nonces, binding), **hello})
    welcome = await protocol.greeting(reader)
    if not protocol.is_proof(welcome.get("proof"), protocol.proof(host.token, "agent", nonces, binding)):
        raise RemoteRefused("the agent does not have the token")
    facts = _facts(welcome)
    if differences := protocol.own_versions().differences(facts.versions):
        raise InputError(
            f"has other versions: {'; '.join(differences)}",
            where=f"host {host.name!r}",
            way_out="Install the same versions on all machines.",
        )
    return facts


def _facts(welcome: Mapping[str, Any]) -> AgentFacts:
    try:
        return AgentFacts(
            tuple(devices_from_json(welcome["devices"])),
            HostResources(*welcome["supplies"]),
            Versions(**welcome["versions"]),
            Path(welcome["state"]),
            str(welcome["drivers"]),
            bool(welcome["is_running"]),
            str(welcome["job_in_hand"]),
            str(welcome.get("used_by", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteRefused(f"an answer that is not of this protocol: {error!r}") from None


def describe_drivers() -> str:
    """The version of this machine's GPU driver; empty without one."""
    nvml = Nvml.open()
    if nvml is None:
        return ""
    with closing(nvml):
        return nvml.driver_version()


Status = tuple[int, int]  # size and time of change of a file


class FileChanged(CarpoolError):
    """A file was replaced or deleted while it was read."""


LINK_ERRORS = (HostUnreachable, ConnectionError, TimeoutError, ssl.SSLError)  # the request may be repeated


class RemoteFiles:
    """Files of the jobs on another machine, over a connection of its own; one request at a time."""

    def __init__(self, host: Host, timeout_s: float = _REQUEST_S, purpose: str = "files") -> None:
        self._host = host
        self._purpose = purpose  # "code" with a token for peers
        self._timeout_s = timeout_s  # of one request: over a link that was cut silently, no answer comes
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def request(self, value: Mapping[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer; InputError if the agent refuses it, OSError if the link breaks."""
        async with self._lock:
            if self._connection is None:
                self._connection = await connect(self._host, self._purpose)
            reader, writer, _ = self._connection
            try:
                async with asyncio.timeout(self._timeout_s):
                    await protocol.send(writer, value, payload)
                    answer = await protocol.receive(reader)
            except BaseException:
                self.close()
                raise
            if answer is None:
                self.close()
                raise ConnectionError(f"host {self._host.name!r} closed the connection")
        if "error" in answer[0]:
            raise InputError(str(answer[0]["error"]), where=f"host {self._host.name!r}")
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.writer.close()
            self._connection = None

    async def require_paths(self, job: str, paths: Sequence[str]) -> None:
        """InputError for a path that a job names and the machine lacks."""
        missing = (await self.request({"do": "missing", "paths": list(paths)}))[0]["missing"] if paths else []
        if missing:
            raise InputError(
                f"job {job!r} names {missing[0]}, which does not exist there",
                where=f"host {self._host.name!r}",
                way_out="Copy or mount it at the same path, or keep it in the job's folder.",
            )

    async def put_code(self, digest: str, content: bytes) -> None:
        """Send a code archive unless the machine has it."""
        if (await self.request({"do": "has_code", "digest": digest}))[0]["has"]:
            return
        for start in range(0, max(1, len(content)), protocol.CHUNK_BYTES):
            chunk = content[start : start + protocol.CHUNK_BYTES]
            await self.request({"do": "put_code", "digest": digest, "size": len(content), "start": start}, chunk)

    async def unpack(self, job: str, digest: str, links: Mapping[str, str]) -> str:
        """Unpack an archive for a job. Returns its folder there."""
        answer, _ = await self.request({"do": "unpack", "job": job, "digest": digest, "links": dict(links)})
        return str(answer["folder"])

    async def list_files(self, job: str) -> dict[str, Status]:
        """Size and time of change of a job's files by relative path."""
        return {name: (size, at) for name, size, at in (await self.request({"do": "list", "job": job}))[0]["files"]}

    async def jobs(self) -> list[str]:
        """The jobs that have a folder there."""
        return list((await self.request({"do": "jobs"}))[0]["jobs"])

    async def read(self, job: str, path: str, start: int = 0, status: Status | None = None) -> AsyncIterator[bytes]:
        """The content of a file from a byte on; `FileChanged` if it was replaced or deleted since it had the status."""
        while True:
            answer, chunk = await self.request({"do": "read", "job": job, "path": path, "start": start})
            if status is not None and answer["status"] != list(status):
                raise FileChanged(f"{path} of job {job!r} was replaced while it was read")
            if not chunk:
                return
            yield chunk
            start += len(chunk)

    async def write(self, job: str, path: str, source: Path) -> None:
        """Write a file there, whole or not at all."""
        start = 0
        with os.fdopen(open_untrusted(source), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (chunk := file.read(protocol.CHUNK_BYTES)) or not start:
                value = {"do": "write", "job": job, "path": path, "start": start, "size": size}
                await self.request(value, chunk)
                start += len(chunk)
                if not chunk:
                    return

    async def renew(self, job: str) -> None:
        """Begin a stay of a job: files of an earlier one are deleted, and leftover workers cannot write them again."""
        await self.request({"do": "renew", "job": job})

    async def drop(self, job: str) -> None:
        """Delete all files of a job."""
        with contextlib.suppress(InputError):
            await self.request({"do": "drop", "job": job})
