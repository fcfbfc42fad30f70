"""Web application of ``carpool serve``: API and dashboard on a Unix socket and a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from carpool.backends.profile_library import ROOT, ProfileLibrary
from carpool.core.errors import InputError
from carpool.core.model import JobId
from carpool.dashboard.routes import mount
from carpool.jobs.job_file import ListedJob
from carpool.predictors.profiles.rate_model import ProfileRateModel
from carpool.service.admission import Quotas
from carpool.service.auth import TOKEN_FILE, AccessTokens, Principal, Role, write_secret
from carpool.service.config import Settings
from carpool.service.daemon.bootstrap import DaemonInstance
from carpool.service.http.app import make_app
from carpool.service.http.auth_middleware import origin_of
from carpool.service.http.deps import ApiContext, principal_of
from carpool.service.http.limits import Limits
from carpool.service.http.metrics import ServiceMetrics
from carpool.service.http.server import Listener, WebServer
from carpool.service.http.submission import PathPolicy
from carpool.service.service import SchedulerService
from carpool.service.transport import check_encrypted, is_loopback, listen_tcp, listen_unix, server_context
from carpool.service.whatif import WhatIfPlanner

OWN_TOKEN = "token"  # file in the state folder with the owner's token, for browsers on this machine
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_LIMIT_SETTINGS = ("body_bytes", "jobs_at_once", "requests_per_s", "burst", "streams", "connections")


class Listeners(NamedTuple):
    """Open sockets of a daemon; clients that connect before the server is up wait."""

    unix: Listener
    tcp: Listener | None


@contextmanager
def open_listeners(settings: Settings) -> Iterator[Listeners]:
    """Open the Unix socket and the TCP port; InputError if that fails or would be insecure."""
    tokens = AccessTokens(settings.state / TOKEN_FILE)
    tls = server_context(settings)
    with ExitStack() as stack:
        tcp = _open_tcp(settings, tokens)
        if tcp is not None:
            stack.enter_context(tcp)
        unix = stack.enter_context(listen_unix(settings.socket))
        stack.callback(settings.socket.unlink, missing_ok=True)
        yield Listeners(Listener(unix), None if tcp is None else Listener(tcp, tls))


@asynccontextmanager
async def serve_api(
    daemon: DaemonInstance, settings: Settings, meters: ServiceMetrics, listeners: Listeners
) -> AsyncIterator[str]:
    """Serve API and dashboard while the daemon runs; yields the addresses to print."""
    tokens = AccessTokens(daemon.options.state / TOKEN_FILE)
    quotas = Quotas.read(settings.users, "users")
    service = SchedulerService(daemon.read_model, daemon.recovered.notes, quotas)
    limits = replace(Limits(), **{name: settings[name] for name in _LIMIT_SETTINGS})
    context = ApiContext(
        service,
        tokens,
        owner=_owner(),
        uid=os.geteuid(),
        roots=PathPolicy(settings.roots),
        hosts=_hosts(settings),
        origins=tuple(map(origin_of, settings["public"])),
        proxies=tuple(settings["proxies"]),
        limits=limits,
        planner=WhatIfPlanner(service, daemon.devices, lambda: daemon.policy_text, read_profiles),
        metrics=meters,
    )
    app = make_app(context)
    mount(
        app,
        service,
        principal_of,
        streams=app.state.streams,
        reports=settings.state / "reports",
        federations=settings.state / "federations",
    )
    server = WebServer(app, [listener for listener in listeners if listener is not None], limits)
    serving = asyncio.create_task(server.run_until_stopped())
    serving.add_done_callback(lambda _: daemon.stop())  # stop the daemon if its server fails
    try:
        await server.up.wait()
        yield describe_addresses(settings, None if listeners.tcp is None else listeners.tcp.socket)
    finally:
        daemon.observers.events.feed.close()
        server.stop()
        await serving


def _owner() -> Principal:
    return Principal(getpass.getuser(), Role.ADMIN)


def _open_tcp(settings: Settings, tokens: AccessTokens) -> socket.socket | None:
    """Open the TCP port, if one is set; InputError if other machines could reach it and no token exists."""
    host, port = settings["host"], settings["port"]
    if not port:
        return None
    if not is_loopback(host) and not tokens.all():
        raise InputError(
            f"host is {host!r}, which other machines can reach, but no access token exists",
            way_out="Create one with carpool token add NAME --role admin, or listen on 127.0.0.1 only.",
        )
    check_encrypted(settings)
    try:
        listening = listen_tcp(host, port)
    except InputError:
        if settings.origins["port"] == settings.origins["host"] == "default":
            return None  # another user's daemon has the default port; the Unix socket suffices
        raise
    if not tokens.all():
        write_secret(tokens.path.with_name(OWN_TOKEN), tokens.add(_owner(), time.time()) + "\n")
    return listening


def describe_addresses(settings: Settings, tcp: socket.socket | None) -> str:
    """Addresses the daemon listens on, with what clients need there."""
    text = f"unix:{settings.socket}"
    if tcp is None and settings["port"]:
        return f"{text} only: port {settings['port']} is taken by another program, so there is no page; set --port"
    if tcp is None:
        return text
    host = settings["host"]
    own = settings.state / OWN_TOKEN
    token = f"needs a token; yours is in {own}" if own.exists() else "needs a token"
    scheme = "https" if settings["tls_cert"] else "http"
    text += f" and {scheme}://{f'[{host}]' if ':' in host else host}:{tcp.getsockname()[1]} ({token})"
    if not is_loopback(host) and not settings["tls_cert"]:
        text += "; other machines can reach it, and traffic is not encrypted"
    return text


def _hosts(settings: Settings) -> tuple[str, ...]:
    host = settings["host"]
    own = (f"[{host}]" if ":" in host else host,) if host not in ("0.0.0.0", "::") else (socket.gethostname(),)
    return (*_LOOPBACK_NAMES, *own, *settings["hosts"])


def read_profiles(jobs: Sequence[ListedJob]) -> Mapping[JobId, ProfileRateModel]:
    """Read the saved profiles in the jobs' folders."""
    found: dict[JobId, ProfileRateModel] = {}
    for folder in {job.program.folder for job in jobs}:
        with contextlib.suppress(OSError):
            found |= ProfileLibrary(Path(folder) / ROOT).beliefs([job for job in jobs if job.program.folder == folder])
    return found
