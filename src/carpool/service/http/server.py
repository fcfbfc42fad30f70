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
    """HTTP on one connection; knows who is at the other end of a Unix socket, and does not wait for ever."""

    def __init__(self, *given: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*given, **named)
        self._waiting = _Timeout(limits.headers_s)  # for the headers of a request
        self._stalled = _Timeout(limits.stalled_s)  # while the other end takes nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there."""
        super().connection_made(transport)
        uid = peer_uid(transport.get_extra_info("socket"))
        if uid is not None:
            self.app_state = {**self.app_state, PEER: uid}
            self.limit_concurrency = None  # whoever fills the port must not lock the daemon's owner out
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


class _Timeout:
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


class Listener(NamedTuple):
    """A socket that listens, and how those who come by it are spoken to; None: in the clear."""

    socket: socket.socket
    tls: SSLContext | None = None


class WebServer(uvicorn.Server):
    """Serves an application on sockets until `stop`; signals are the business of whoever runs it."""

    def __init__(self, app: ASGIApp, ears: Sequence[Listener], limits: Limits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(TimeoutProtocol, limits=limits),  # type: ignore[arg-type]  # it is only ever called
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
        self._ears = tuple(ears)
        self.up = asyncio.Event()  # once requests are taken

    async def run_until_stopped(self) -> None:
        """Serve; returns when `stop` was called and the last answers are out."""
        await self.serve([ear.socket for ear in self._ears])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests; one socket after another, because uvicorn speaks to all alike."""
        servers = []
        for ear in self._ears:
            self.config.ssl = ear.tls
            await super().startup([ear.socket])
            servers += self.servers
        self.servers = servers
        self.up.set()

    def stop(self) -> None:
        """Take no more requests and end."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
