"""The web application over a service rig, with one HTTP client per role: in memory, or on real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from threading import Thread
from typing import Any

import httpx
from starlette.types import ASGIApp

from carpool.service.admission import Quotas
from carpool.service.auth import AccessTokens, Principal, Role
from carpool.service.http.app import make_app
from carpool.service.http.auth_middleware import PEER
from carpool.service.http.deps import ApiContext, Planner
from carpool.service.http.limits import Limits
from carpool.service.http.server import Listener, WebServer
from carpool.service.http.submission import PathPolicy
from carpool.service.transport import listen_tcp, listen_unix
from tests.support.service_rig import ServiceRig, open_service

BASE = "http://localhost:7637"
UID = 4711  # the owner's
PRINCIPALS = {
    "ada": Principal("ada"),
    "ben": Principal("ben"),
    "root": Principal("root", Role.ADMIN),
    "screen": Principal("screen", Role.READER),
}
LAX_LIMITS = Limits(requests_per_s=1e6, burst=1e6, failed_logins_burst=1e6, stream_s=0.2, batch_s=0.0)
ENTRY = "def main(lr=0.1):\n    ...\n"  # the content of train.py in the rig's folder


@dataclass(frozen=True, slots=True)
class HttpRig:
    """An application and its clients: one for each of PRINCIPALS, one on the socket, one without a token."""

    app: ASGIApp
    backend: ServiceRig
    context: ApiContext
    folder: Path  # the allowed root of jobs, with train.py
    clients: Mapping[str, httpx.AsyncClient]

    def __getitem__(self, name: str) -> httpx.AsyncClient:
        return self.clients[name]

    def body(self, *names: str, **table: Any) -> dict[str, Any]:
        """A submission of jobs with these names."""
        return {
            "folder": str(self.folder),
            "job": [{"name": name, "entry": "train.py:main", **table} for name in names],
        }


@asynccontextmanager
async def open_http(
    folder: Path,
    *,
    limits: Limits = LAX_LIMITS,
    quotas: Quotas | None = None,
    planner: Planner | None = None,
    uid: int = UID,
    origins: tuple[str, ...] = (),
    proxies: tuple[str, ...] = (),
) -> AsyncIterator[HttpRig]:
    """Run an application; each of PRINCIPALS has a token."""
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text(ENTRY, encoding="utf-8")
    tokens = AccessTokens(folder / "tokens.json")
    secrets = {name: tokens.add(principal, 0.0) for name, principal in PRINCIPALS.items()}
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(open_service(folder / "state", quotas=quotas))
        context = ApiContext(
            backend.service,
            tokens,
            owner=Principal("owner", Role.ADMIN),
            uid=uid,
            roots=PathPolicy((folder / "work",)),
            origins=origins,
            proxies=proxies,
            limits=limits,
            planner=planner,
        )
        app = make_app(context)
        clients = {name: client_of(app, secrets[name]) for name in PRINCIPALS}
        clients["nobody"] = client_of(app)
        clients["owner"] = client_of(by_socket(app, uid))
        for client in clients.values():
            await stack.enter_async_context(client)
        yield HttpRig(app, backend, context, folder / "work", clients)


def run_hostile(folder: Path, scenario: Callable[[HttpRig], Awaitable[None]], **options: Any) -> None:
    """Send hostile requests and check that none of them submitted a job."""

    async def run() -> None:
        async with open_http(folder, **options) as rig:
            await scenario(rig)
            untouched = (await rig["root"].get("/v1/jobs")).json()
            assert untouched["total"] == 0, "a hostile request submitted a job"

    asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Served:
    """A rig on real sockets, in its own thread."""

    url: str
    socket: Path
    tokens: Mapping[str, str]  # of PRINCIPALS
    rig: HttpRig
    loop: asyncio.AbstractEventLoop

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the daemon's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def serve_http(folder: Path, *, tls: SSLContext | None = None, **options: Any) -> Iterator[Served]:
    """Serve on a free port and on a Unix socket that belongs to this process's user."""
    made: Future[Served] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        options.setdefault("uid", os.getuid())
        async with open_http(folder, **options) as rig:
            tcp, unix = listen_tcp("127.0.0.1", 0), listen_unix(folder / "s")
            server = WebServer(rig.app, [Listener(tcp, tls), Listener(unix)], rig.context.limits)
            serving = asyncio.create_task(server.run_until_stopped())
            await server.up.wait()
            tokens = {
                name: client.headers["Authorization"][7:] for name, client in rig.clients.items() if name in PRINCIPALS
            }
            url = f"{'https' if tls else 'http'}://127.0.0.1:{tcp.getsockname()[1]}"
            made.set_result(Served(url, folder / "s", tokens, rig, asyncio.get_running_loop()))
            await stop.wait()
            rig.backend.read_model.events.feed.close()
            server.stop()
            await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not made.done():
                made.set_exception(error)
            raise

    thread = Thread(target=run, name="rig")
    thread.start()
    try:
        served = made.result(30)
        yield served
    finally:
        if made.done() and made.exception() is None:
            made.result().loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def client_of(app: Any, token: str = "") -> httpx.AsyncClient:
    """A client of an application, with or without a token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers)


def by_socket(app: Any, uid: int) -> Any:
    """Wrap an application as if its requests came over a Unix socket from this user id."""

    async def seen(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {PEER: uid}}, receive, send)

    return seen
