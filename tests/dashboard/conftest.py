"""A dashboard over a daemon whose jobs only pretend to train, for a client in this process or for a real browser."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from datetime import UTC
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.dashboard.routes import mount
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.auth import Principal, Role
from carpool.service.service import SchedulerService
from carpool.sim.traces.trace import Arrival
from tests.support.simulated_daemon import DemoWorld, open_simulated_daemon

PEOPLE = {
    "ada": Principal("ada"),
    "ben": Principal("ben"),
    "root": Principal("root", Role.ADMIN),
    "screen": Principal("screen", Role.READER),
}


def job(name: str, at: float = 0.0, work: float = 1000.0, **fields: Any) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), work=work, **{"user": "ada", **fields}))


def person_of(request: Request) -> Principal:
    return PEOPLE[request.headers.get("x-person", "root")]


def make_app(clerk: SchedulerService, reports: Path | None = None) -> FastAPI:
    app = FastAPI(openapi_url=None)
    mount(app, clerk, person_of, secret=b"for tests", reports=reports, zone=UTC)
    return app


class Room(NamedTuple):
    """The dashboard for a client in this process."""

    client: httpx.AsyncClient
    clerk: SchedulerService


Open = Callable[..., AbstractAsyncContextManager[Room]]


@pytest.fixture
def open_room(tmp_path: Path) -> Open:
    """A room with these jobs, some time after the first was submitted."""

    @asynccontextmanager
    async def opened(
        arrivals: Sequence[Arrival] = (),
        *,
        now: float = 100.0,
        cluster: Cluster | None = None,
        reports: Path | None = None,
    ) -> AsyncIterator[Room]:
        cluster = cluster or Cluster.build([(2, 2, "V100")])
        async with open_simulated_daemon(
            tmp_path, cluster, Fifo(), arrivals, live_from=now, report_every_s=10.0
        ) as clerk:
            transport = httpx.ASGITransport(make_app(clerk, reports))
            async with httpx.AsyncClient(transport=transport, base_url="http://carpool.test") as client:
                yield Room(client, clerk)

    return opened


class Site(NamedTuple):
    """The dashboard on a port of this machine, in a thread of its own."""

    address: str
    clerk: SchedulerService
    do: Callable[[Coroutine[Any, Any, Any]], Any]  # there, and wait for what comes of it
    close: Callable[[], None]


class Server(uvicorn.Server):
    """Says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


async def serve(room: AbstractAsyncContextManager[SchedulerService], reports: Path | None, ready: Future[Site]) -> None:
    """Serve until somebody closes."""
    async with room as clerk:
        config = uvicorn.Config(make_app(clerk, reports), port=0, log_level="error", lifespan="off")
        server = Server(config)
        serving = asyncio.create_task(server.serve())
        await server.is_up.wait()
        loop = asyncio.get_running_loop()

        def close() -> None:
            clerk._in.events.feed.close()  # so that no stream goes on
            server.should_exit = True

        port = server.servers[0].sockets[0].getsockname()[1]
        ready.set_result(
            Site(
                f"http://127.0.0.1:{port}",
                clerk,
                lambda wish: asyncio.run_coroutine_threadsafe(wish, loop).result(20),
                lambda: None if loop.is_closed() else (loop.call_soon_threadsafe(close), None)[1],
            )
        )
        await serving


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """A site with these jobs, in real time; it is closed at the end."""
    with ExitStack() as stack:

        def opened(
            arrivals: Sequence[Arrival] = (),
            *,
            now: float = 100.0,
            cluster: Cluster | None = None,
            report_every_s: float = 0.2,
            reports: Path | None = None,
            steps_per_s: float = 1.0,
        ) -> Site:
            ready: Future[Site] = Future()

            def run() -> None:
                try:
                    room = open_simulated_daemon(
                        tmp_path,
                        cluster or Cluster.build([(2, 2, "V100")]),
                        Fifo(),
                        arrivals,
                        live_from=now,
                        report_every_s=report_every_s,
                        world=DemoWorld(steps_per_s={"": steps_per_s}),
                    )
                    asyncio.run(serve(room, reports, ready))
                except BaseException as error:
                    if ready.done():
                        raise
                    ready.set_exception(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            stack.callback(thread.join, 20)
            site = ready.result(60)
            stack.callback(site.close)
            return site

        yield opened
