"""The daemon's ears: a Unix socket for its own user and, where it is wanted, a TCP port; slow clients are let go."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from carpool.core.errors import InputError
from carpool.service.door import PEER
from carpool.service.limits import Limits

_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end
_LONGEST_PATH = 107  # of a Unix socket, in bytes


class PatientProtocol(H11Protocol):
    """HTTP on one connection; knows who is at the other end of a Unix socket, and does not wait for ever."""

    def __init__(self, *given: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*given, **named)
        self._waiting = _Alarm(limits.headers_s)  # for the headers of a request
        self._stalled = _Alarm(limits.stalled_s)  # while the other end takes nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        super().connection_made(transport)
        uid = peer_uid(transport.get_extra_info("socket"))
        if uid is not None:
            self.app_state = {**self.app_state, PEER: uid}
        self._waiting.set(transport.close)

    def data_received(self, data: bytes) -> None:
        """They say something: a whole request, or a piece of one."""
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        if cycle is not None and not cycle.response_complete:
            self._waiting.clear()
        else:
            self._waiting.set(self.transport.close)

    def pause_writing(self) -> None:
        """They take nothing for now."""
        super().pause_writing()
        self._stalled.set(self.transport.abort)

    def resume_writing(self) -> None:
        """They go on."""
        super().resume_writing()
        self._stalled.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """They have gone."""
        self._waiting.clear()
        self._stalled.clear()
        super().connection_lost(exc)


class _Alarm:
    """Rings after a while unless it is cleared; setting it again while it is set changes nothing."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def set(self, ring: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, ring)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class WebServer(uvicorn.Server):
    """Serves an application on sockets until `stop`; signals are the business of whoever runs it."""

    def __init__(self, app: ASGIApp, sockets: Sequence[socket.socket], limits: Limits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(PatientProtocol, limits=limits),  # type: ignore[arg-type]  # it is only ever called
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.connections,
                timeout_graceful_shutdown=3,
            )
        )
        self._listening = list(sockets)
        self.up = asyncio.Event()  # once requests are taken

    async def run_until_stopped(self) -> None:
        """Serve; returns when `stop` was called and the last answers are out."""
        await self.serve(self._listening)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests."""
        await super().startup(sockets)
        self.up.set()

    def stop(self) -> None:
        """Take no more requests and end."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def peer_uid(sock: Any) -> int | None:
    """The user id at the other end of a Unix socket, as the kernel knows it; None for any other socket."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket of mode 0600; what a dead daemon left at its place is replaced."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InputError(
            f"socket is {str(path)!r}, {len(os.fsencode(path))} bytes long; the limit is {_LONGEST_PATH}",
            way_out="Name a shorter one with --socket.",
        )
    if path.is_socket():
        if is_answering(path):
            raise InputError(f"a daemon answers at {path} already", way_out="Stop it first, or name another --state.")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # never, not for an instant, open to others
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen(256)
    return listening


def is_answering(path: Path) -> bool:
    """Whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        try:
            trying.connect(str(path))
        except OSError:
            return False
        return True


def listen_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket at a host and port; port 0 takes a free one."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as failing:
            listening = failing.enter_context(socket.socket(family, kind, number))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(256)
            failing.pop_all()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}", way_out="Name another --host or --port.") from None
    return listening


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; a name counts where all its addresses do."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)
