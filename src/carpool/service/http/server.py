"""Web server: uvicorn with Unix-socket peer credentials and timeouts for slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ssl import SSLContext
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from carpool.service.http.auth_middleware import PEER
from carpool.service.http.limits import Limits
from carpool.service.transport import peer_uid


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 protocol that passes on the user id of a Unix socket's peer and disconnects slow clients."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._headers_timeout = _Timeout(limits.headers_s)
        self._write_timeout = _Timeout(limits.stalled_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        uid = peer_uid(transport.get_extra_info("socket"))
        if uid is not None:
            self.app_state = {**self.app_state, PEER: uid}
            self.limit_concurrency = None  # too many TCP connections must not lock out the daemon's owner
        self._headers_timeout.set(transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request, despite its annotation
        if cycle is not None and not cycle.response_complete:
            self._headers_timeout.clear()
        else:
            self._headers_timeout.set(self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timeout.set(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timeout.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_timeout.clear()
        self._write_timeout.clear()
        super().connection_lost(exc)


class _Timeout:
    """Calls a function after a delay unless cleared; setting it again does not restart the delay."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def set(self, action: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, action)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Listener(NamedTuple):
    """A listening socket and its TLS context; None: plain HTTP."""

    socket: socket.socket
    tls: SSLContext | None = None


class WebServer(uvicorn.Server):
    """Serves an application on several sockets until `stop`; leaves signals to the process that runs it."""

    def __init__(self, app: ASGIApp, listeners: Sequence[Listener], limits: Limits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(TimeoutProtocol, limits=limits),  # type: ignore[arg-type]  # uvicorn only calls it
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
        self._listeners = tuple(listeners)
        self.up = asyncio.Event()  # set once requests are accepted

    async def run_until_stopped(self) -> None:
        """Serve until `stop`, and until the last responses are sent."""
        await self.serve([listener.socket for listener in self._listeners])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start one socket after another, because uvicorn has one TLS context for all sockets of a startup."""
        servers = []
        for listener in self._listeners:
            self.config.ssl = listener.tls
            await super().startup([listener.socket])
            servers += self.servers
        self.servers = servers
        self.up.set()

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
