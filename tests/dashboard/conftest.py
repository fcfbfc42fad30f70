"""The dashboard of a simulated daemon, for a client in this process or a real browser."""

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

PRINCIPALS = {
    "ada": Principal("ada"),
    "ben": Principal("ben"),
    "root": Principal("root", Role.ADMIN),
    "screen": Principal("screen", Role.READER),
}


def job(name: str, at: float = 0.0, work: float = 1000.0, **fields: Any) -> Arrival:
    return Arrival(at, JobSpec(JobId(name), work=work, **{"user": "ada", **fields}))


def principal_of(request: Request) -> Principal:
    return PRINCIPALS[request.headers.get("x-user", "root")]


def make_app(service: SchedulerService, reports: Path | None = None, federations: Path | None = None) -> FastAPI:
    app = FastAPI(openapi_url=None)
    mount(app, service, principal_of, secret=b"for tests", reports=reports, federations=federations, zone=UTC)
    return app


class LocalDashboard(NamedTuple):
    """The dashboard for a client in this process."""

    client: httpx.AsyncClient
    service: SchedulerService


Open = Callable[..., AbstractAsyncContextManager[LocalDashboard]]


@pytest.fixture
def open_dashboard(tmp_path: Path) -> Open:
    """Open the dashboard of a daemon with these jobs, `now` seconds after the first submission."""

    @asynccontextmanager
    async def opened(
        arrivals: Sequence[Arrival] = (),
        *,
        now: float = 100.0,
        cluster: Cluster | None = None,
        reports: Path | None = None,
    ) -> AsyncIterator[LocalDashboard]:
        cluster = cluster or Cluster.build([(2, 2, "V100")])
        async with open_simulated_daemon(
            tmp_path, cluster, Fifo(), arrivals, live_from=now, report_every_s=10.0
        ) as service:
            transport = httpx.ASGITransport(make_app(service, reports))
            async with httpx.AsyncClient(transport=transport, base_url="http://carpool.test") as client:
                yield LocalDashboard(client, service)

    return opened


class Site(NamedTuple):
    """The dashboard on a local port, served by a thread."""

    address: str
    service: SchedulerService
    do: Callable[[Coroutine[Any, Any, Any]], Any]  # run on the server's event loop and wait
    close: Callable[[], None]


class Server(uvicorn.Server):
    """Sets an event once it accepts requests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


async def serve(
    daemon: AbstractAsyncContextManager[SchedulerService],
    reports: Path | None,
    federations: Path | None,
    ready: Future[Site],
) -> None:
    """Serve until the site is closed."""
    async with daemon as service:
        config = uvicorn.Config(
            make_app(service, reports, federations), port=0, log_level="error", lifespan="off", ws="none"
        )
        server = Server(config)
        serving = asyncio.create_task(server.serve())
        await server.is_up.wait()
        loop = asyncio.get_running_loop()

        def close() -> None:
            service._model.events.feed.close()  # ends open streams
            server.should_exit = True

        port = server.servers[0].sockets[0].getsockname()[1]
        ready.set_result(
            Site(
                f"http://127.0.0.1:{port}",
                service,
                lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(20),
                lambda: None if loop.is_closed() else (loop.call_soon_threadsafe(close), None)[1],
            )
        )
        await serving


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Open a site with these jobs, in real time; closed after the test."""
    with ExitStack() as stack:

        def opened(
            arrivals: Sequence[Arrival] = (),
            *,
            now: float = 100.0,
            cluster: Cluster | None = None,
            report_every_s: float = 0.2,
            reports: Path | None = None,
            federations: Path | None = None,
            steps_per_s: float = 1.0,
        ) -> Site:
            ready: Future[Site] = Future()

            def run() -> None:
                try:
                    daemon = open_simulated_daemon(
                        tmp_path,
                        cluster or Cluster.build([(2, 2, "V100")]),
                        Fifo(),
                        arrivals,
                        live_from=now,
                        report_every_s=report_every_s,
                        world=DemoWorld(steps_per_s={"": steps_per_s}),
                    )
                    asyncio.run(serve(daemon, reports, federations, ready))
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
