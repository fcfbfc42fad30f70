"""Protocol between a scheduler and the agent of another machine: handshake, versions and file requests.

Both sides prove that they have the host's token with an HMAC over both nonces and the digest of the agent's TLS
certificate. So the token never travels, and no other server can stand between the two, whoever signed its
certificate. The connection then carries the executor's own lines, or requests for files.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from typing import Any

from carpool import __version__
from carpool.core.errors import CarpoolError

PROTOCOL = 3
CHUNK_BYTES = 1 << 20
HANDSHAKE_S = 10.0
PEER_PURPOSES = ("workers", "code", "probe")  # purposes of connections from other hosts of a fleet
_LENGTH_BYTES = 4
_MAX_HEAD_BYTES = 1 << 20  # of a message without its payload
_MAX_GREETING_BYTES = 4096  # before the other side has proved who it is


class RemoteRefused(CarpoolError):
    """The other machine refused a connection or a request."""

    def __init__(self, problem: str, way_out: str = "") -> None:
        super().__init__(problem)
        self.way_out = way_out


class HandshakeBroken(RemoteRefused):
    """The connection ended or fell silent during the handshake; it may be tried again."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions that must be equal on all machines of a fleet."""

    protocol: int
    carpool: str
    python: str  # without the micro version
    torch: str

    def differences(self, other: Versions) -> list[str]:
        """Such as ``torch 2.11.0 here, 2.12.0 there``."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {ours[name]} here, {theirs[name]} there" for name in ours if ours[name] != theirs[name]]


def own_versions() -> Versions:
    """The versions of this process, without importing torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return Versions(PROTOCOL, __version__, ".".join(platform.python_version_tuple()[:2]), torch)


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(16)


def proof(token: str, role: str, nonces: tuple[str, str], binding: bytes) -> str:
    """The proof that one side has the token; `binding` is the digest of the agent's certificate."""
    message = b"\0".join([b"carpool", role.encode(), *(nonce.encode() for nonce in nonces), binding])
    return hmac.new(token.encode(), message, sha256).hexdigest()


def peer_token(token: str) -> str:
    """The token of a host for other hosts: it allows them to start workers there and to send code, nothing else."""
    return hmac.new(token.encode(), b"carpool peer", sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Compare in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


async def send(writer: asyncio.StreamWriter, value: Mapping[str, Any], payload: bytes = b"") -> None:
    """Send one message: a JSON object, followed by bytes."""
    if writer.is_closing():
        raise ConnectionResetError("the connection is closed")
    head = json.dumps({**value, "payload": len(payload)} if payload else value, separators=(",", ":")).encode("ascii")
    writer.write(len(head).to_bytes(_LENGTH_BYTES, "big") + head + payload)
    await writer.drain()


async def receive(
    reader: asyncio.StreamReader, max_head_bytes: int = _MAX_HEAD_BYTES
) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None at the end. `RemoteRefused` for one that is not of this protocol."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > max_head_bytes:
            raise RemoteRefused(f"a message of {length} bytes; at most {max_head_bytes} are accepted")
        value = json.loads(await reader.readexactly(length))
        if not isinstance(value, dict):
            raise RemoteRefused("a message that is not an object")
        size = value.pop("payload", 0)
        if not isinstance(size, int) or not 0 <= size <= CHUNK_BYTES:
            raise RemoteRefused(f"a payload of {size!r} bytes; at most {CHUNK_BYTES} are accepted")
        return value, await reader.readexactly(size) if size else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except ValueError as error:
        raise RemoteRefused(f"a message that is not JSON: {error}") from None


async def greeting(reader: asyncio.StreamReader) -> dict[str, Any]:
    """A message of the handshake; `RemoteRefused` if none comes in time."""
    try:
        found = await asyncio.wait_for(receive(reader, _MAX_GREETING_BYTES), HANDSHAKE_S)
    except TimeoutError:
        raise HandshakeBroken(f"no answer within {HANDSHAKE_S:g} s") from None
    if found is None:
        raise HandshakeBroken("the connection was closed during the handshake")
    if "refused" in found[0]:
        raise RemoteRefused(str(found[0]["refused"]), str(found[0].get("way_out", "")))
    return found[0]
