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
from carpool.dashboard import text_format as amounts
from carpool.dashboard.actions import check_token, execute_action, job_address, read_form, token_for
from carpool.dashboard.comparison import Reports
from carpool.dashboard.job_detail import describe_holdings
from carpool.dashboard.job_list import devices_asked, devices_held
from carpool.dashboard.pages import PAGES, Page, PageRequest
from carpool.dashboard.stream import page_events
from carpool.dashboard.text_format import colour
from carpool.dashboard.time_window import LENGTHS
from carpool.service.auth import Forbidden, Principal
from carpool.service.daemon.loop import CommitFailed
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
    clerk: SchedulerService,
    person_of: Callable[[Request], Principal],
    *,
    streams: Streams | None = None,
    secret: bytes | None = None,
    reports: Path | None = None,
    zone: tzinfo | None = None,
) -> None:
    """Add the dashboard to an application.

    `person_of` says who asks, and raises what the application answers for whoever may not. `secret` signs forms; where
    none is given it is drawn, and forms from before a restart are refused. `reports` is a folder of what ``carpool
    simulate`` wrote. Times are told in `zone`, by default the machine's own. `streams` counts what each person follows,
    pages included.
    """
    streams = streams or Streams(clerk, Limits())
    secret = secret or secrets.token_bytes(32)
    pages = Dashboard(clerk, person_of, streams, secret, Reports(reports), zone or _zone_here())
    for page in PAGES:
        app.add_api_route(page.path, pages.guarded(partial(pages.page, page)), methods=["GET"], include_in_schema=False)
    for path, endpoint, method in (
        ("/", pages.home, "GET"),
        ("/wish/{verb}", pages.wish, "POST"),
        ("/compare", pages.hand_in, "POST"),
        ("/dashboard/events", pages.events, "GET"),
        ("/dashboard/{name}", pages.static, "GET"),
    ):
        app.add_api_route(path, pages.guarded(endpoint), methods=[method], include_in_schema=False)


class Dashboard:
    """Answers browsers with what the clerk says."""

    def __init__(
        self,
        clerk: SchedulerService,
        person_of: Callable[[Request], Principal],
        streams: Streams,
        secret: bytes,
        reports: Reports,
        zone: tzinfo,
    ) -> None:
        self._clerk = clerk
        self._person_of = person_of
        self._streams = streams
        self._secret = secret
        self._reports = reports
        self._zone = zone
        self._templates = _environment(zone)

    # ----------------------------------------------------------------------------------------------------- answering
    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint whose refusals are pages too."""

        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RequestRejected:
                raise  # the application says itself whom it lets in, and how often
            except CarpoolError as error:
                status = next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.BAD_REQUEST)
                return self._refusal(request, status, str(error))

        return answer

    async def home(self, request: Request) -> Response:
        """The cluster is where one begins."""
        return RedirectResponse("/cluster", HTTPStatus.TEMPORARY_REDIRECT)

    async def page(self, page: Page, request: Request) -> Response:
        """A page, or with ``?panel=`` one of its panels."""
        who = self._person_of(request)
        query = dict(request.query_params)
        job = str(request.path_params.get("job", ""))
        asked = PageRequest(self._clerk, who, query, self._zone, self._reports, job)
        panel = query.pop("panel", "")
        if panel and panel not in page.panels:
            raise NotFound(f"the page {page.name!r} has no panel {panel!r}")
        shows = {name: await ask(asked) for name, ask in page.panels.items() if not panel or name == panel}
        common = self._common(request, who) | {"page": page, "query": query, "job_name": job}
        template = f"panels/{panel}.html" if panel else f"{page.name}.html"
        html = await asyncio.to_thread(self._render, template, common, shows)
        return HTMLResponse(html, headers=HEADERS)

    async def wish(self, request: Request) -> Response:
        """Carry out what a form asks for, then show what came of it."""
        who, form = await self._form(request)
        address = await execute_action(self._clerk, who, str(request.path_params["verb"]), form)
        return RedirectResponse(address, HTTPStatus.SEE_OTHER)

    async def hand_in(self, request: Request) -> Response:
        """Take in a report, then show it."""
        who, form = await self._form(request)
        key = await asyncio.to_thread(self._reports.hand_in, who, form.get("name", ""), form.get("report", ""))
        return RedirectResponse(f"/compare?report={quote(key)}", HTTPStatus.SEE_OTHER)

    async def events(self, request: Request) -> Response:
        """The feed, as pages want it."""
        who = self._person_of(request)
        answer = self._streams.open(who, page_events(self._clerk, who), "text/event-stream")
        answer.headers.update(HEADERS)
        return answer

    async def static(self, request: Request) -> Response:
        """Style, script and icon: the same for everybody."""
        name = str(request.path_params["name"])
        if name not in _STATIC:
            raise NotFound(f"there is no file {name!r}")
        content = resources.files("carpool.dashboard").joinpath("static", name).read_bytes()
        headers = HEADERS | {"Cache-Control": "no-cache"}
        return Response(content, media_type=_STATIC[name], headers=headers)

    # --------------------------------------------------------------------------------------------------------- inside
    async def _form(self, request: Request) -> tuple[Principal, Mapping[str, str]]:
        """Who sends a form, and its fields; refused unless it is from a page of ours."""
        who = self._person_of(request)
        form = read_form(await request.body())
        check_token(who, self._secret, form.get("token", ""))
        return who, form

    def _common(self, request: Request, who: Principal) -> dict[str, Any]:
        return {"who": who, "token": token_for(who, self._secret), "address": str(request.url.path), "pages": PAGES}

    def _render(self, template: str, common: Mapping[str, Any], shows: Mapping[str, Callable[[], Any]]) -> str:
        return self._templates.get_template(template).render(**common, **{name: show() for name, show in shows.items()})

    def _refusal(self, request: Request, status: HTTPStatus, words: str) -> Response:
        if "panel" in request.query_params:
            return HTMLResponse(
                self._templates.get_template("panels/refusal.html").render(words=words), status, HEADERS
            )
        common = self._common(request, self._person_of(request))
        html = self._templates.get_template("refusal.html").render(
            **common, page=None, query={}, job_name="", status=status, words=words
        )
        return HTMLResponse(html, status, HEADERS)


def _environment(zone: tzinfo) -> Environment:
    """Templates with the words that pages are written in; everything is escaped, and a wrong name is an error."""
    environment = Environment(
        loader=PackageLoader("carpool.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "colour": colour,
        "count": amounts.count,
        "devices_asked": devices_asked,
        "devices_held": devices_held,
        "duration": amounts.duration,
        "expected": amounts.expected,
        "held_in_words": describe_holdings,
        "job_address": job_address,
        "memory": amounts.memory,
        "moment": lambda at, now: amounts.moment(at, zone, now),
        "number": amounts.number,
        "percent": amounts.percent,
        "plain": amounts.plain,
        "rough": amounts.rough,
        "stamp": amounts.stamp,
    }
    environment.globals["lengths"] = LENGTHS
    return environment


def _zone_here() -> tzinfo:
    return datetime.now(UTC).astimezone().tzinfo or UTC
