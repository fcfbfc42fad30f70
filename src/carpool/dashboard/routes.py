"""Dashboard routes: pages, panels, actions, static files and the event stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, tzinfo
from functools import partial
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from carpool.core.errors import CarpoolError, InputError
from carpool.core.units import format_param, format_params
from carpool.dashboard import text_format
from carpool.dashboard.actions import check_token, execute_action, job_path, read_form, token_for
from carpool.dashboard.comparison import Reports
from carpool.dashboard.federation import Federations
from carpool.dashboard.job_detail import format_devices
from carpool.dashboard.job_list import devices_allocated, devices_requested
from carpool.dashboard.pages import PAGES, Compute, Page, PageRequest
from carpool.dashboard.stream import page_events
from carpool.dashboard.time_window import LENGTHS
from carpool.service.auth import Forbidden, Principal
from carpool.service.daemon.group_commit import CommitFailed
from carpool.service.http.auth_middleware import HEADERS
from carpool.service.http.limits import Limits
from carpool.service.http.problems import RequestRejected
from carpool.service.http.streams import Streams
from carpool.service.service import Conflict, NotFound, SchedulerService

_STATIC = {"dashboard.css": "text/css", "dashboard.js": "text/javascript", "icon.svg": "image/svg+xml"}
_STATUS: tuple[tuple[type[CarpoolError], HTTPStatus], ...] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (InputError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (CommitFailed, HTTPStatus.SERVICE_UNAVAILABLE),
)

Endpoint = Callable[[Request], Awaitable[Response]]


def mount(
    app: FastAPI,
    service: SchedulerService,
    principal_of: Callable[[Request], Principal],
    *,
    streams: Streams | None = None,
    secret: bytes | None = None,
    reports: Path | None = None,
    federations: Path | None = None,
    zone: tzinfo | None = None,
) -> None:
    """Add the dashboard to an application.

    `principal_of` authenticates a request, or raises the application's error. `secret` signs forms; by default it is
    random, which rejects forms from before a restart. `reports` is a folder with output of ``carpool simulate``,
    `federations` one with folders of ``carpool federate``. Times are shown in `zone`, by default the machine's.
    `streams` limits the open event streams of each user.
    """
    streams = streams or Streams(service, Limits())
    secret = secret or secrets.token_bytes(32)
    zone = zone or datetime.now(UTC).astimezone().tzinfo or UTC
    pages = Dashboard(service, principal_of, streams, secret, Reports(reports), Federations(federations), zone)
    for page in PAGES:
        app.add_api_route(page.path, pages.guarded(partial(pages.page, page)), methods=["GET"], include_in_schema=False)
    for path, endpoint, method in (
        ("/", pages.home, "GET"),
        ("/actions/{verb}", pages.action, "POST"),
        ("/compare", pages.upload_report, "POST"),
        ("/dashboard/events", pages.events, "GET"),
        ("/dashboard/{name}", pages.static, "GET"),
    ):
        app.add_api_route(path, pages.guarded(endpoint), methods=[method], include_in_schema=False)


class Dashboard:
    """Endpoints of the dashboard."""

    def __init__(
        self,
        service: SchedulerService,
        principal_of: Callable[[Request], Principal],
        streams: Streams,
        secret: bytes,
        reports: Reports,
        federations: Federations,
        zone: tzinfo,
    ) -> None:
        self._service = service
        self._principal_of = principal_of
        self._streams = streams
        self._secret = secret
        self._reports = reports
        self._federations = federations
        self._zone = zone
        self._templates = template_environment(zone)

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        async def respond(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RequestRejected:
                raise  # authentication and rate limits are handled by the application
            except CarpoolError as error:
                status = next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.BAD_REQUEST)
                return self._error_page(request, status, str(error))

        return respond

    async def home(self, request: Request) -> Response:
        return RedirectResponse("/cluster", HTTPStatus.TEMPORARY_REDIRECT)

    async def page(self, page: Page, request: Request) -> Response:
        """Render a page, or with ``?panel=`` one of its panels."""
        principal = self._principal_of(request)
        query = dict(request.query_params)
        job = str(request.path_params.get("job", ""))
        page_request = PageRequest(self._service, principal, query, self._zone, self._reports, self._federations, job)
        panel = query.pop("panel", "")
        if panel and panel not in page.panels:
            raise NotFound(f"page {page.name!r} has no panel {panel!r}")
        panels = {name: await load(page_request) for name, load in page.panels.items() if panel in ("", name)}
        common = self._common(principal) | {"page": page, "query": query, "job_name": job}
        template = f"panels/{panel}.html" if panel else f"{page.name}.html"
        html = await asyncio.to_thread(self._render, template, common, panels)
        return HTMLResponse(html, headers=HEADERS)

    async def action(self, request: Request) -> Response:
        principal, form = await self._form(request)
        path = await execute_action(self._service, principal, str(request.path_params["verb"]), form)
        return RedirectResponse(path, HTTPStatus.SEE_OTHER)

    async def upload_report(self, request: Request) -> Response:
        principal, form = await self._form(request)
        key = await asyncio.to_thread(self._reports.upload, principal, form.get("name", ""), form.get("report", ""))
        return RedirectResponse(f"/compare?report={quote(key)}", HTTPStatus.SEE_OTHER)

    async def events(self, request: Request) -> Response:
        principal = self._principal_of(request)
        response = self._streams.open(principal, page_events(self._service, principal), "text/event-stream")
        response.headers.update(HEADERS)
        return response

    async def static(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in _STATIC:
            raise NotFound(f"unknown file {name!r}")
        content = resources.files("carpool.dashboard").joinpath("static", name).read_bytes()
        headers = HEADERS | {"Cache-Control": "no-cache"}
        return Response(content, media_type=_STATIC[name], headers=headers)

    async def _form(self, request: Request) -> tuple[Principal, Mapping[str, str]]:
        """Principal and fields of a form; Forbidden unless its token is valid."""
        principal = self._principal_of(request)
        form = read_form(await request.body())
        check_token(principal, self._secret, form.get("token", ""))
        return principal, form

    def _common(self, principal: Principal) -> dict[str, Any]:
        return {"principal": principal, "token": token_for(principal, self._secret), "pages": PAGES}

    def _render(self, template: str, common: Mapping[str, Any], panels: Mapping[str, Compute]) -> str:
        computed = {name: compute() for name, compute in panels.items()}
        return self._templates.get_template(template).render(**common, **computed)

    def _error_page(self, request: Request, status: HTTPStatus, message: str) -> Response:
        if "panel" in request.query_params:
            return HTMLResponse(
                self._templates.get_template("panels/error.html").render(message=message), status, HEADERS
            )
        common = self._common(self._principal_of(request))
        html = self._templates.get_template("error.html").render(
            **common, page=None, query={}, job_name="", status=status, message=message
        )
        return HTMLResponse(html, status, HEADERS)


def template_environment(zone: tzinfo) -> Environment:
    """The environment of all templates; times are shown in `zone`."""
    environment = Environment(
        loader=PackageLoader("carpool.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "colour": text_format.colour,
        "count": text_format.count,
        "devices_requested": devices_requested,
        "devices_allocated": devices_allocated,
        "duration": text_format.duration,
        "devices_text": format_devices,
        "job_path": job_path,
        "memory": text_format.memory,
        "moment": lambda at, now: text_format.moment(at, zone, now),
        "number": text_format.number,
        "param": format_param,
        "params": lambda params: format_params(params.items()),
        "percent": text_format.percent,
        "plain": text_format.plain,
        "rough": text_format.rough,
        "stamp": text_format.stamp,
    }
    environment.globals["lengths"] = LENGTHS
    return environment
