"""The web application over an office, and people who ask it: no sockets, no machine."""

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
PEOPLE = {
    "ada": Principal("ada"),
    "ben": Principal("ben"),
    "root": Principal("root", Role.ADMIN),
    "screen": Principal("screen", Role.READER),
}
GENEROUS = Limits(requests_per_s=1e6, burst=1e6, strangers_burst=1e6, stream_s=0.2, gather_s=0.0)
ENTRY = "def main(lr=0.1):\n    ...\n"  # what train.py in the reception's folder holds


@dataclass(frozen=True, slots=True)
class HttpRig:
    """An application and clients of it: one for each of PEOPLE, one by the socket, one who is nobody."""

    app: ASGIApp
    office: ServiceRig
    desk: ApiContext
    folder: Path  # where jobs may be; it holds train.py
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
    limits: Limits = GENEROUS,
    allowances: Quotas | None = None,
    planner: Planner | None = None,
    uid: int = UID,
    origins: tuple[str, ...] = (),
    proxies: tuple[str, ...] = (),
) -> AsyncIterator[HttpRig]:
    """An application whose people have tokens."""
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text(ENTRY, encoding="utf-8")
    tokens = AccessTokens(folder / "tokens.json")
    secrets = {name: tokens.add(person, 0.0) for name, person in PEOPLE.items()}
    async with AsyncExitStack() as stack:
        office = await stack.enter_async_context(open_service(folder / "state", allowances=allowances))
        desk = ApiContext(
            office.clerk,
            tokens,
            owner=Principal("owner", Role.ADMIN),
            uid=uid,
            roots=PathPolicy((folder / "work",)),
            origins=origins,
            proxies=proxies,
            limits=limits,
            planner=planner,
        )
        app = make_app(desk)
        clients = {name: client_of(app, secrets[name]) for name in PEOPLE}
        clients["nobody"] = client_of(app)
        clients["owner"] = client_of(by_socket(app, uid))
        for client in clients.values():
            await stack.enter_async_context(client)
        yield HttpRig(app, office, desk, folder / "work", clients)


def withstand(folder: Path, scene: Callable[[HttpRig], Awaitable[None]], **options: Any) -> None:
    """Play a scene of hostile requests; none of them may have submitted a job."""

    async def play() -> None:
        async with open_http(folder, **options) as reception:
            await scene(reception)
            untouched = (await reception["root"].get("/v1/jobs")).json()
            assert untouched["total"] == 0, "a hostile request was granted"

    asyncio.run(play())


@dataclass(frozen=True, slots=True)
class Served:
    """A reception behind real sockets, in a thread of its own."""

    url: str
    socket: Path
    tokens: Mapping[str, str]  # of PEOPLE
    reception: HttpRig
    loop: asyncio.AbstractEventLoop

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have something done where the daemon runs, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def serve_http(folder: Path, *, tls: SSLContext | None = None, **options: Any) -> Iterator[Served]:
    """Listen on a free port and on a Unix socket, whose owner is whoever runs this process."""
    made: Future[Served] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        options.setdefault("uid", os.getuid())
        async with open_http(folder, **options) as reception:
            tcp, unix = listen_tcp("127.0.0.1", 0), listen_unix(folder / "s")
            server = WebServer(reception.app, [Listener(tcp, tls), Listener(unix)], reception.desk.limits)
            serving = asyncio.create_task(server.run_until_stopped())
            await server.up.wait()
            tokens = {
                name: client.headers["Authorization"][7:]
                for name, client in reception.clients.items()
                if name in PEOPLE
            }
            url = f"{'https' if tls else 'http'}://127.0.0.1:{tcp.getsockname()[1]}"
            made.set_result(Served(url, folder / "s", tokens, reception, asyncio.get_running_loop()))
            await stop.wait()
            reception.office.read_model.events.feed.close()
            server.stop()
            await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if not made.done():
                made.set_exception(error)
            raise

    thread = Thread(target=run, name="reception")
    thread.start()
    try:
        served = made.result(30)
        yield served
    finally:
        if made.done() and made.exception() is None:
            made.result().loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def client_of(app: Any, token: str = "") -> httpx.AsyncClient:
    """Somebody who asks an application, with a token or without."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers)


def by_socket(app: Any, uid: int) -> Any:
    """The application as somebody at a Unix socket sees it."""

    async def seen(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {PEER: uid}}, receive, send)

    return seen
