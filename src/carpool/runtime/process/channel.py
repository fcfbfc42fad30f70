"""Channel between executor and worker: JSON lines over a Unix socket pair, file descriptors, heartbeats.

A line that comes with descriptors begins with their number: ``2 {"say":…}``. Descriptors never arrive before the first
byte of their line, so counting them tells which line they belong to. A line is checked before it becomes a message: its
length while it is read, its values by the types of the protocol. Workers use the blocking `Channel`, the executor
`AsyncChannel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import CarpoolError
from carpool.core.typed_fields import InvalidField, decode_fields, shortened, shown
from carpool.runtime.process import protocol
from carpool.runtime.process.protocol import Alive, Message

_READ_BYTES = 1 << 16
MAX_DESCRIPTORS = 64  # of one message
MAX_MESSAGE_BYTES = 1 << 24
_ANCILLARY_BYTES = socket.CMSG_LEN(MAX_DESCRIPTORS * struct.calcsize("i"))
_READ_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

_TYPES: dict[str, type[Message]] = {
    message.__name__: message
    for message in vars(protocol).values()
    if isinstance(message, type) and issubclass(message, Message) and message is not Message
}
_FIELDS = {name: tuple(field.name for field in fields(message)) for name, message in _TYPES.items()}
_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(CarpoolError):
    """A line is not a message of the protocol."""


def encode(message: Message) -> bytes:
    """A message as one line; long texts are cut."""
    name = type(message).__name__
    values = {field: getattr(message, field) for field in _FIELDS[name]}
    for field, value in values.items():
        if type(value) is str:
            values[field] = shortened(value)
    return _encode_json({"say": name, **values}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of `encode`; ProtocolError for an invalid message or a value out of range."""
    try:
        value = json.loads(line)
        kind = _TYPES[value.pop("say")]
        return decode_fields(kind, value, ignore_unknown=True)
    except InvalidField as error:
        raise ProtocolError(f"{shown(line)} is not a message: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"{shown(line)} is not a message: {type(error).__name__}: {shown(error)}") from None


class Closed(CarpoolError):
    """The other side has closed the channel."""


class Received(NamedTuple):
    """A message and its descriptors, which now belong to the receiver."""

    message: Message
    fds: tuple[int, ...]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a new connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def close_all_but(kept: int) -> None:
    """Close all descriptors of this process but the standard ones and one."""
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # the one the listing itself had open
                os.close(fd)


class Channel:
    """A worker's end: blocking, with a cheap `poll`. Any thread may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._sending = threading.Lock()
        self._incoming = _Incoming()
        self._poll = select.poll()
        self._poll.register(end.fileno(), select.POLLIN)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; its descriptors are duplicated and stay the caller's."""
        line = memoryview(_framed(message, fds))
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [line], list(fds)) if fds else 0
                if sent < len(line):
                    self._socket.sendall(line[sent:])
        except OSError as error:
            raise Closed(f"{type(message).__name__} was not sent: {error.strerror}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll(self) -> bool:
        """Whether `receive` would return, or fail, at once; takes about a microsecond."""
        return self._incoming.is_ready or bool(self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """The next message; ``None`` after a timeout. Raises `Closed` if none will follow."""
        while (found := self._incoming.take()) is None:
            if not self._poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
                return None
            with contextlib.suppress(BlockingIOError):
                self._incoming.read(self._socket)
        return found

    def close(self) -> None:
        self._socket.close()
        self._incoming.close()


class AsyncChannel:
    """An executor's end, for one asyncio loop: `send` never blocks or fails, `receive` raises `Closed`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._incoming = _Incoming()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._awaited: asyncio.Future[None] | None = None
        self._ended: CarpoolError | None = None  # why no message follows
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message; its descriptors may be closed when this returns. Dropped if the channel is closed."""
        if self._ended is not None:
            return
        idle = not self._outgoing
        self._outgoing.append((memoryview(_framed(message, fds)), [os.dup(fd) for fd in fds]))
        if idle:
            self._write()

    async def receive(self) -> Received:
        """The next message. Raises `Closed` if none will follow, `ProtocolError` for an invalid one."""
        while (found := self._incoming.take()) is None:
            if self._ended is not None:
                raise self._ended
            self._awaited = self._loop.create_future()
            await self._awaited
        return found

    def close(self) -> None:
        """Close this end; a `receive` that waits raises `Closed`."""
        if self._socket.fileno() >= 0:
            self._end(Closed("closed here"))
            self._socket.close()
            self._incoming.close()

    def _read(self) -> None:
        try:
            self._incoming.read(self._socket)
        except BlockingIOError:
            return
        except Closed as error:
            self._end(Closed(str(error)))
        except ProtocolError as error:
            self._end(error)
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _write(self) -> None:
        try:
            while self._outgoing:
                line, fds = self._outgoing[0]
                sent = socket.send_fds(self._socket, [line], fds) if fds else self._socket.send(line)
                close_all(fds)
                if sent < len(line):
                    self._outgoing[0] = (line[sent:], [])
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._write)
            return
        except OSError:
            self._drop_outgoing()  # the reader sees the end after all earlier messages
        self._loop.remove_writer(self._socket.fileno())

    def _end(self, reason: CarpoolError) -> None:
        self._ended = self._ended or reason
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._drop_outgoing()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _drop_outgoing(self) -> None:
        for _, fds in self._outgoing:
            close_all(fds)
        self._outgoing.clear()


class _Incoming:
    """Splits incoming bytes and descriptors into messages."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._lines: deque[bytes] = deque()
        self._fds: deque[int] = deque()

    @property
    def is_ready(self) -> bool:
        return bool(self._lines)

    def read(self, end: socket.socket) -> None:
        try:
            # Not socket.recv_fds, which drops its flags: programs that a worker starts would inherit the descriptors.
            data, ancillary, flags, _ = end.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, _READ_FLAGS)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Closed(f"connection lost: {error.strerror}") from error
        for _, _, numbers in ancillary:
            self._fds.extend(memoryview(numbers).cast("i"))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(f"descriptors were lost: more than {MAX_DESCRIPTORS} in a message, or too many open")
        if not data:
            raise Closed("the other side closed the channel")
        first, *rest = data.split(b"\n")
        self._partial.append(first)
        self._partial_bytes += len(first)
        for piece in rest:
            self._lines.append(b"".join(self._partial))
            self._partial, self._partial_bytes = [piece], len(piece)
        if self._partial_bytes > MAX_MESSAGE_BYTES:
            self._partial.clear()
            raise ProtocolError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes")

    def take(self) -> Received | None:
        if not self._lines:
            return None
        line = self._lines.popleft()
        count = 0
        if line[:1].isdigit():
            number, _, line = line.partition(b" ")
            count = int(number) if len(number) <= 3 and number.isdigit() else MAX_DESCRIPTORS + 1
        if count > len(self._fds):
            raise ProtocolError(f"{line[:80]!r} needs {count} descriptors; {len(self._fds)} came")
        return Received(decode(line), tuple(self._fds.popleft() for _ in range(count)))

    def close(self) -> None:
        close_all(self._fds)
        self._fds.clear()
        self._lines.clear()
        self._partial.clear()


def _framed(message: Message, fds: Sequence[int]) -> bytes:
    line = encode(message)
    return b"%d %s" % (len(fds), line) if fds else line


class Heartbeat:
    """Sends `Alive` at an interval; exits the process when the channel is closed, even in the middle of a step."""

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _beat(self) -> None:
        wait = threading.Event().wait
        try:
            while not wait(self._interval_s):
                self._channel.send(Alive())
        except Closed:
            os._exit(0)
