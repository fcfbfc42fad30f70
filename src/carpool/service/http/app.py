"""FastAPI application of a daemon: routes, middleware and error handlers."""

from __future__ import annotations

from time import monotonic
from typing import Any

from fastapi import FastAPI

from carpool import __version__
from carpool.service.http import api
from carpool.service.http import login as sign_in
from carpool.service.http import streams as told
from carpool.service.http.auth_middleware import AuthMiddleware
from carpool.service.http.deps import ApiContext
from carpool.service.http.limits import BodyLimitMiddleware, LoginThrottle
from carpool.service.http.metrics import MetricsMiddleware
from carpool.service.http.problems import ProblemDetails, install_error_handlers
from carpool.service.http.streams import Streams

_ABOUT = """Jobs are submitted, watched and steered here. All jobs run as one Unix user, the daemon's.

Every error is a problem (RFC 9457, `application/problem+json`) with what is wrong, where, and the way out.
Over the daemon's Unix socket its own user needs no token; everybody else sends one as `Authorization: Bearer TOKEN`."""


def make_app(desk: ApiContext) -> FastAPI:
    """The application; `desk` is what it stands on."""
    app = FastAPI(
        title="carpool",
        version=__version__,
        summary="Lets many deep-learning training jobs share GPUs.",
        description=_ABOUT,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.desk = desk
    app.state.streams = Streams(desk.clerk, desk.limits)
    app.include_router(api.open_router)
    app.include_router(api.router)
    app.include_router(api.metrics_router)
    app.include_router(told.router)
    app.include_router(sign_in.router)
    app.state.strangers = LoginThrottle(desk.limits, desk.proxies)
    desk.meters.watch(desk.clerk)
    install_error_handlers(app)
    _describe_problems(app)
    app.add_middleware(BodyLimitMiddleware, limits=desk.limits)
    app.add_middleware(  # what is added later stands before what was added before
        AuthMiddleware,
        tokens=desk.tokens,
        owner=desk.owner,
        uid=desk.uid,
        hosts=desk.hosts,
        origins=desk.origins,
        limits=desk.limits,
        strangers=app.state.strangers,
        now=monotonic,
    )
    app.add_middleware(MetricsMiddleware, meters=desk.meters)
    return app


def _describe_problems(app: FastAPI) -> None:
    """Put the form of problems into the API's description: routes name it, but FastAPI does not see that."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            form = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(form.pop("$defs", {}))
            schemas["ProblemDetails"] = form
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change it
