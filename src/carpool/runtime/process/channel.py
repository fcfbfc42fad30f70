"""Channel between executor and worker: JSON lines over a Unix socket pair, file descriptors, heartbeats."""

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
from typing import Any, NamedTuple

from carpool.core.errors import CarpoolError
from carpool.runtime.process import protocol
from carpool.runtime.process.protocol import Alive, Message

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in vars(protocol).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
_SPOTS = {name: tuple(spot.name for spot in fields(kind)) for name, kind in _KINDS.items()}
_write = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(CarpoolError):
    """A line that is no message: a bug, or somebody else on the socket."""


def encode(message: Message) -> bytes:
    """A message as one line."""
    name = type(message).__name__
    return _write({"say": name, **{spot: getattr(message, spot) for spot in _SPOTS[name]}}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of `encode`."""
    try:
        value = json.loads(line)
        name = value.pop("say")
        return _KINDS[name](**{spot: _frozen(value[spot]) for spot in _SPOTS[name]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"{line[:200]!r} is no message: {type(error).__name__}: {error}") from None


def _frozen(item: Any) -> Any:
    """Lists back into the tuples they were."""
    return tuple(_frozen(part) for part in item) if isinstance(item, list) else item


# A line that comes with descriptors begins with their number: ``2 {"say":…}``. The kernel hands descriptors over together
# with the first byte of the line or later bytes of the same read, never before, so that counting is enough to tell which
# line they belong to. A worker uses `Channel`, which blocks; an executor uses `AsyncChannel`.


_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64  # beside one message
_BESIDE_BYTES = socket.CMSG_LEN(_MOST_DESCRIPTORS * struct.calcsize("i"))
_HOW_TO_READ = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


class Closed(CarpoolError):
    """The other side is gone."""


class Received(NamedTuple):
    """A message and the descriptors beside it, which now belong to the receiver."""

    message: Message
    fds: tuple[int, ...]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a new connection; nothing of it is visible in the file system."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


class Channel:
    """A worker's end: blocking, with a quick look whether anything is there. Any thread may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._sending = threading.Lock()
        self._incoming = _Incoming()
        self._poll = select.poll()
        self._poll.register(end.fileno(), select.POLLIN)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Say something; descriptors are duplicated on the way and stay the caller's."""
        line = memoryview(_framed(message, fds))
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [line], list(fds)) if fds else 0
                if sent < len(line):
                    self._socket.sendall(line[sent:])
        except OSError as error:
            raise Closed(f"nobody hears {type(message).__name__}: {error.strerror}") from error

    def fileno(self) -> int:
        """The descriptor at which there is something to read when somebody has spoken."""
        return self._socket.fileno()

    def poll(self) -> bool:
        """Whether `receive` would return, or fail, at once; takes about a microsecond."""
        return self._incoming.is_ready or bool(self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """The next message; ``None`` if none came in time. Raises `Closed` when there will be none."""
        while (found := self._incoming.take()) is None:
            if not self._poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)):
                return None
            with contextlib.suppress(BlockingIOError):
                self._incoming.read(self._socket)
        return found

    def close(self) -> None:
        """Close this end and whatever was not taken."""
        self._socket.close()
        self._incoming.close()


class AsyncChannel:
    """An executor's end, for one asyncio loop: sending never waits and never fails, the end is seen by `receive`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._incoming = _Incoming()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._awaited: asyncio.Future[None] | None = None
        self._ended = ""
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Say something; descriptors may be closed as soon as this returns. What nobody hears any more is dropped."""
        if self._ended:
            return
        idle = not self._outgoing
        self._outgoing.append((memoryview(_framed(message, fds)), [os.dup(fd) for fd in fds]))
        if idle:
            self._write()

    async def receive(self) -> Received:
        """The next message. Raises `Closed` when there will be none."""
        while (found := self._incoming.take()) is None:
            if self._ended:
                raise Closed(self._ended)
            self._awaited = self._loop.create_future()
            await self._awaited
        return found

    def close(self) -> None:
        """Close this end; a `receive` that waits raises `Closed`."""
        if self._socket.fileno() >= 0:
            self._end("closed here")
            self._socket.close()
            self._incoming.close()

    def _read(self) -> None:
        try:
            self._incoming.read(self._socket)
        except BlockingIOError:
            return
        except Closed as error:
            self._end(str(error))
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
            self._drop_outgoing()  # whoever receives will see the end once all that was said before it is heard
        self._loop.remove_writer(self._socket.fileno())

    def _end(self, reason: str) -> None:
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
    """Bytes and descriptors as they arrive, cut into messages."""

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._lines: deque[bytes] = deque()
        self._fds: deque[int] = deque()

    @property
    def is_ready(self) -> bool:
        return bool(self._lines)

    def read(self, end: socket.socket) -> None:
        """Read once what is there."""
        try:
            # Not socket.recv_fds, which drops its flags: descriptors would be inherited by what a worker starts.
            data, beside, flags, _ = end.recvmsg(_READ_BYTES, _BESIDE_BYTES, _HOW_TO_READ)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Closed(f"the other side is gone: {error.strerror}") from error
        for _, _, numbers in beside:
            self._fds.extend(memoryview(numbers).cast("i"))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                f"descriptors were lost: more than {_MOST_DESCRIPTORS} beside a message, or too many open"
            )
        if not data:
            raise Closed("the other side has closed the channel")
        first, *rest = data.split(b"\n")
        self._partial.append(first)
        for piece in rest:
            self._lines.append(b"".join(self._partial))
            self._partial = [piece]

    def take(self) -> Received | None:
        """The next whole message, if there is one."""
        if not self._lines:
            return None
        line = self._lines.popleft()
        count = 0
        if line[:1].isdigit():
            number, _, line = line.partition(b" ")
            count = int(number)
        if count > len(self._fds):
            raise ProtocolError(f"{count} descriptors belong to {line[:80]!r}; {len(self._fds)} came")
        return Received(decode(line), tuple(self._fds.popleft() for _ in range(count)))

    def close(self) -> None:
        """Let go of what was not taken."""
        close_all(self._fds)
        self._fds.clear()
        self._lines.clear()


def _framed(message: Message, fds: Sequence[int]) -> bytes:
    line = encode(message)
    return b"%d %s" % (len(fds), line) if fds else line


class Heartbeat:
    """Says `Alive` at an interval; ends the process when nobody hears it, even in the middle of a step."""

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _beat(self) -> None:
        wait = threading.Event().wait
        try:
            while not wait(self._interval_s):
                self._channel.send(Alive())
        except Closed:
            os._exit(0)
