"""Dashboard behind the daemon's authentication, and the addresses that are printed."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from carpool.cli.support.serve_app import describe_addresses, open_listeners
from carpool.core.errors import InputError
from carpool.dashboard.routes import mount
from carpool.service.config import read_settings
from carpool.service.http.deps import principal_of
from carpool.service.transport import listen_tcp
from tests.support.http_rig import BASE, LAX_LIMITS, open_http

PAGE = {"Accept": "text/html"}


def test_pages_require_sign_in_and_same_origin(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_http(tmp_path) as at:
            app: Any = at.app
            mount(app, at.context.service, principal_of, streams=app.state.streams)
            await at["ada"].post("/v1/jobs", json=at.body("a"))
            browser = at["nobody"]
            away = await browser.get("/jobs", headers=PAGE)
            assert (away.status_code, away.headers["location"]) == (303, "/sign-in?next=/jobs")
            assert (await browser.get("/jobs?panel=jobs")).status_code == 401, "a panel is not redirected"
            token = at["ada"].headers["Authorization"].removeprefix("Bearer ")
            await browser.post("/sign-in", data={"token": token}, headers={"Origin": BASE})
            shown = await browser.get("/jobs", headers=PAGE)
            assert (shown.status_code, 'href="/jobs/a"' in shown.text) == (200, True)
            forged = await browser.post("/actions/cancel", data={"job": "a"}, headers={"Origin": "http://evil.example"})
            assert forged.status_code == 403
            assert (await at["ada"].get("/v1/jobs/a")).json()["phase"] == "running"

    asyncio.run(play())


def test_page_events_count_as_streams(tmp_path: Path) -> None:
    async def play() -> None:
        async with open_http(tmp_path, limits=replace(LAX_LIMITS, streams=0)) as at:
            app: Any = at.app
            mount(app, at.context.service, principal_of, streams=app.state.streams)
            refused = await at["ada"].get("/dashboard/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")

    asyncio.run(play())


def test_addresses_warn_about_unencrypted_traffic(tmp_path: Path) -> None:
    settings = read_settings({"HOME": str(tmp_path), "CARPOOL_HOST": "0.0.0.0"})
    assert describe_addresses(settings, None).startswith(f"unix:{settings.socket} only: port {settings['port']}")
    with listen_tcp("127.0.0.1", 0) as tcp:
        assert "not encrypted" in describe_addresses(settings, tcp)


def test_a_daemon_does_without_the_default_port_but_not_without_one_that_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, port: int) -> socket.socket:
        raise InputError(f"cannot listen on {host}:{port}")

    monkeypatch.setattr("carpool.cli.support.serve_app.listen_tcp", refuse)
    home = {"HOME": str(tmp_path), "CARPOOL_STATE": str(tmp_path)}
    with open_listeners(read_settings(home)) as listeners:
        assert listeners.tcp is None
    with pytest.raises(InputError, match="8999"), open_listeners(read_settings({**home, "CARPOOL_PORT": "8999"})):
        pass
