"""Problem details (RFC 9457): turn every error into a JSON response with cause and remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Match

from carpool.backends.executors import ExecutorGone
from carpool.core.errors import CarpoolError, InputError, InvalidTransition
from carpool.service.admission import QuotaExceeded
from carpool.service.auth import Forbidden
from carpool.service.daemon.group_commit import CommitFailed, ReadOnly
from carpool.service.service import Conflict, NotFound

MEDIA_TYPE = "application/problem+json"

_STATUSES: dict[type[CarpoolError], int] = {
    NotFound: 404,
    Conflict: 409,
    InvalidTransition: 409,
    QuotaExceeded: 409,
    Forbidden: 403,
    InputError: 422,
    CommitFailed: 503,
    ReadOnly: 507,
    ExecutorGone: 503,
}


_NOT_FOUND = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Not found – carpool</title>
<link rel="stylesheet" href="/dashboard/dashboard.css"></head>
<body><main><div class="empty tall" role="alert"><h1>Not found</h1><p>There is no page <code>{path}</code>.</p>
<p><a href="/jobs">All jobs</a> · <a href="/cluster">Cluster</a></p></div></main></body>
</html>
"""


class FieldError(BaseModel):
    """One invalid field of a request."""

    where: str = Field(description="Path of the field.", examples=["body.job.0.weight"])
    problem: str = Field(description="What is wrong.", examples=["Input should be greater than 0"])


class ProblemDetails(BaseModel):
    """An error: what is wrong, where, and what to do."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "about:blank",
                "title": "Unprocessable Content",
                "status": 422,
                "detail": "job 'a' asks 9 devices; there are 8. Lower devices or min_devices.",
                "where": "",
                "way_out": "Lower devices or min_devices.",
                "errors": [],
            }
        }
    )

    type: str = Field("about:blank", description="Always about:blank: the status identifies the type of problem.")
    title: str = Field(description="The phrase of the status code.")
    status: int
    detail: str = Field(description="The error message, including the way out.")
    where: str = Field("", description="The job, file or setting with the error; empty when unknown.")
    way_out: str = Field("", description="How to fix it; empty when unknown.")
    errors: list[FieldError] = Field(default_factory=list, description="All invalid fields of the request.")


class RequestRejected(CarpoolError):
    """A request that is rejected with an HTTP status before it is executed."""

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = dict(headers or {})


def problem(
    status: int,
    detail: str,
    *,
    where: str = "",
    way_out: str = "",
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Build a problem response."""
    details = ProblemDetails(
        type="about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        where=where,
        way_out=way_out,
        errors=list(errors),
    )
    # json rather than pydantic: the message may quote lone surrogates from the request.
    text = json.dumps(details.model_dump())
    return Response(text, status, dict(headers or {}), MEDIA_TYPE)


def problem_of_error(error: CarpoolError) -> Response:
    """Build the response to a carpool error."""
    if isinstance(error, RequestRejected):
        return problem(error.status, str(error), headers=error.headers)
    status = next((code for error_type, code in _STATUSES.items() if isinstance(error, error_type)), 500)
    if isinstance(error, InputError):
        return problem(status, str(error), where=error.where, way_out=error.way_out)
    return problem(status, str(error))


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of an app with a problem response."""

    async def carpool_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, CarpoolError)
        if isinstance(error, RequestRejected) and error.status == HTTPStatus.UNAUTHORIZED and _is_page(request):
            return RedirectResponse(f"/sign-in?next={quote(request.url.path)}", 303)
        return problem_of_error(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.NOT_FOUND and _is_page(request):
            return HTMLResponse(_NOT_FOUND.format(path=escape(request.url.path)), error.status_code, headers)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        return problem(error.status_code, str(error.detail), headers=headers)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # Without the values: they may be secrets.
        errors = [FieldError(where=".".join(map(str, each["loc"])), problem=each["msg"]) for each in error.errors()]
        detail = "; ".join(f"{each.where}: {each.problem}" for each in errors[:3])
        return problem(422, detail, errors=errors)

    async def internal_error(request: Request, error: Exception) -> Response:
        return problem(500, "internal error of carpool. The daemon's log has the details.")

    app.add_exception_handler(CarpoolError, carpool_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, internal_error)


def _is_page(request: Request) -> bool:
    """Whether a browser asks for a page of the dashboard."""
    is_api = request.url.path.startswith(("/v1/", "/metrics"))
    return not is_api and request.method == "GET" and "text/html" in request.headers.get("accept", "")


def _methods(request: Request) -> set[str]:
    """Return the methods that the routes of the requested path accept."""
    return {
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        for route in request.app.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }


def responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Describe the error responses of a route for OpenAPI."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}
