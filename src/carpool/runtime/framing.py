"""Whole messages over a stream socket between processes of one worker: a length, and as many bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


def write(end: socket.socket, content: bytes) -> None:
    """Send something whole."""
    end.sendall(_LENGTH.pack(len(content)))
    end.sendall(content)


def receive(end: socket.socket) -> bytearray | None:
    """What was written; ``None`` if there is nobody any more."""
    head = _exactly(end, _LENGTH.size)
    return None if head is None else _exactly(end, _LENGTH.unpack(head)[0])


def _exactly(end: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            count = end.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return content
