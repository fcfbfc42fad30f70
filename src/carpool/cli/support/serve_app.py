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
from carpool.service.http.auth_middleware import origin_of, principal_of
from carpool.service.http.deps import ApiContext
from carpool.service.http.limits import Limits
from carpool.service.http.metrics import ServiceMetrics
from carpool.service.http.server import Listener, WebServer
from carpool.service.http.submission import PathPolicy
from carpool.service.service import SchedulerService
from carpool.service.transport import check_encrypted, is_loopback, listen_tcp, listen_unix, server_context
from carpool.service.whatif import WhatIfPlanner

OWN_TOKEN = "token"  # in the daemon's folder: its owner's, for browsers on this machine
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SET = ("body_bytes", "jobs_at_once", "requests_per_s", "burst", "streams", "connections")


class Listeners(NamedTuple):
    """Where a daemon can be reached before anything answers there; whoever asks meanwhile waits."""

    unix: Listener
    tcp: Listener | None


@contextmanager
def open_listeners(settings: Settings) -> Iterator[Listeners]:
    """Open the socket and the port; InputError where that cannot or must not be."""
    tokens = AccessTokens(settings.state / TOKEN_FILE)
    tls = server_context(settings)
    with ExitStack() as stack:
        tcp = _tcp(settings, tokens)
        if tcp is not None:
            stack.enter_context(tcp)
        unix = stack.enter_context(listen_unix(settings.socket))
        stack.callback(settings.socket.unlink, missing_ok=True)
        yield Listeners(Listener(unix), None if tcp is None else Listener(tcp, tls))


@asynccontextmanager
async def serve_api(
    house: DaemonInstance, settings: Settings, meters: ServiceMetrics, ears: Listeners
) -> AsyncIterator[str]:
    """Answer around the daemon's run; where, in words."""
    owner = _owner()
    tokens = AccessTokens(house.options.state / TOKEN_FILE)
    allowances = Quotas.read(settings.users, "users")
    clerk = SchedulerService(house.read_model, house.recovered.notes, allowances)
    limits = replace(Limits(), **{name: settings[name] for name in _SET})
    desk = ApiContext(
        clerk,
        tokens,
        owner=owner,
        uid=os.geteuid(),
        roots=PathPolicy(settings.roots),
        hosts=_hosts(settings),
        origins=tuple(map(origin_of, settings["public"])),
        proxies=tuple(settings["proxies"]),
        limits=limits,
        planner=WhatIfPlanner(clerk, house.options.devices, lambda: house.policy_text, beliefs),
        meters=meters,
    )
    app = make_app(desk)
    mount(app, clerk, principal_of, streams=app.state.streams, reports=settings.state / "reports")
    server = WebServer(app, [each for each in ears if each is not None], limits)
    serving = asyncio.create_task(server.run_until_stopped())
    serving.add_done_callback(lambda _: house.stop())  # a daemon that nobody can reach is none
    try:
        await server.up.wait()
        yield where(settings, None if ears.tcp is None else ears.tcp.socket)
    finally:
        house.observers.events.feed.close()
        server.stop()
        await serving


def _owner() -> Principal:
    """Whoever runs the daemon."""
    return Principal(getpass.getuser(), Role.ADMIN)


def _tcp(settings: Settings, tokens: AccessTokens) -> socket.socket | None:
    """The port; InputError where others could reach it and nobody has a token."""
    host, port = settings["host"], settings["port"]
    if not port:
        return None
    if not is_loopback(host) and not tokens.all():
        raise InputError(
            f"host is {host!r}, which is reached from elsewhere, and nobody has a token",
            way_out="Make one first: carpool token add NAME --role admin. Or listen on 127.0.0.1 only.",
        )
    check_encrypted(settings)
    try:
        open_listeners = listen_tcp(host, port)
    except InputError:
        if settings.origins["port"] == settings.origins["host"] == "default":
            return None  # another user's daemon has it; the socket is enough
        raise
    if not tokens.all():
        write_secret(tokens.path.with_name(OWN_TOKEN), tokens.add(_owner(), time.time()) + "\n")
    return open_listeners


def where(settings: Settings, tcp: socket.socket | None) -> str:
    """Where it listens, and what that takes, in words."""
    words = f"unix:{settings.socket}"
    if tcp is None:
        return words
    host = settings["host"]
    own = settings.state / OWN_TOKEN
    token = f"a token; yours is in {own}" if own.exists() else "a token"
    scheme = "https" if settings["tls_cert"] else "http"
    words += f" and {scheme}://{f'[{host}]' if ':' in host else host}:{tcp.getsockname()[1]} (with {token})"
    if not is_loopback(host):
        words += "; that is reached from elsewhere: every request needs a token"
        words += "" if settings["tls_cert"] else ", and what is sent is not encrypted"
    return words


def _hosts(settings: Settings) -> tuple[str, ...]:
    host = settings["host"]
    own = (f"[{host}]" if ":" in host else host,) if host not in ("0.0.0.0", "::") else (socket.gethostname(),)
    return (*_NAMES, *own, *settings["hosts"])


def beliefs(jobs: Sequence[ListedJob]) -> Mapping[JobId, ProfileRateModel]:
    """What profiles in the folders of jobs tell of them."""
    found: dict[JobId, ProfileRateModel] = {}
    for folder in {job.program.folder for job in jobs}:
        with contextlib.suppress(OSError):
            found |= ProfileLibrary(Path(folder) / ROOT).beliefs([job for job in jobs if job.program.folder == folder])
    return found
