"""Problem details (RFC 9457): maps every error to a JSON response with cause and remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match

from carpool.backends.ports import ExecutorGone
from carpool.core.errors import CarpoolError, InputError, InvalidTransition
from carpool.service.admission import QuotaExceeded
from carpool.service.auth import Forbidden
from carpool.service.daemon.loop import CommitFailed
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
    ExecutorGone: 503,
}


class FieldError(BaseModel):
    """One thing that is wrong with what was sent."""

    where: str = Field(description="Where it stands.", examples=["body.job.0.weight"])
    problem: str = Field(description="What is wrong with it.", examples=["Input should be greater than 0"])


class ProblemDetails(BaseModel):
    """What went wrong, and what to do about it."""

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

    type: str = Field("about:blank", description="What kind of problem; the status says it all.")
    title: str = Field(description="The status in words.")
    status: int
    detail: str = Field(description="What is wrong, in a sentence for people.")
    where: str = Field("", description="What it is about, where that is known.")
    way_out: str = Field("", description="What to do.")
    errors: list[FieldError] = Field(default_factory=list, description="Every mistake, where there are several.")


class RequestRejected(CarpoolError):
    """A request that is turned away before anybody looks at what it asks."""

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
    """An answer that tells what went wrong."""
    said = ProblemDetails(
        type="about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        where=where,
        way_out=way_out,
        errors=list(errors),
    )
    # Through the standard library: what was sent may come back in it, and lone surrogates must not break the answer.
    text = json.dumps(said.model_dump())
    return Response(text, status, dict(headers or {}), MEDIA_TYPE)


def problem_of_error(error: CarpoolError) -> Response:
    """The answer to an error of ours."""
    if isinstance(error, RequestRejected):
        return problem(error.status, str(error), headers=error.headers)
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 500)
    if isinstance(error, InputError):
        return problem(status, str(error), where=error.where, way_out=error.way_out)
    return problem(status, str(error))


def install_error_handlers(app: FastAPI) -> None:
    """Let an app answer every error with a problem."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, CarpoolError)
        if isinstance(error, RequestRejected) and error.status == HTTPStatus.UNAUTHORIZED and _is_page(request):
            return RedirectResponse(f"/sign-in?next={quote(request.url.path)}", 303)
        return problem_of_error(error)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        return problem(error.status_code, str(error.detail), headers=headers)

    async def of_form(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # The values themselves are left out: there may be secrets among them.
        mistakes = [FieldError(where=".".join(map(str, each["loc"])), problem=each["msg"]) for each in error.errors()]
        detail = "; ".join(f"{each.where}: {each.problem}" for each in mistakes[:3])
        return problem(422, detail, errors=mistakes)

    async def of_bug(request: Request, error: Exception) -> Response:
        return problem(500, "This is a fault in carpool, not in what was asked; its log says more.")

    app.add_exception_handler(CarpoolError, ours)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_form)
    app.add_exception_handler(Exception, of_bug)


def _is_page(request: Request) -> bool:
    """Whether somebody with a browser looks at one of our pages."""
    is_api = request.url.path.startswith(("/v1/", "/metrics"))
    return not is_api and request.method == "GET" and "text/html" in request.headers.get("accept", "")


def _methods(request: Request) -> set[str]:
    """What may be done at a path, by all of its routes together."""
    return {
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        for route in request.app.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }


def responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """What an API page says of the problems of a route."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}
