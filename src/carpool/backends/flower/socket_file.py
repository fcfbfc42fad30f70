"""Unix sockets that only this user can connect to."""

from __future__ import annotations

import socket
from pathlib import Path


def listen(path: str) -> socket.socket:
    """A listening socket for an event loop."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(path)
    Path(path).chmod(0o600)
    found.listen()
    found.setblocking(False)
    return found
