"""FastAPI application of a daemon: routes, middleware and error handlers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from carpool import __version__
from carpool.service.http import api, login, streams
from carpool.service.http.auth_middleware import AuthMiddleware
from carpool.service.http.deps import ApiContext
from carpool.service.http.limits import BodyLimitMiddleware, LoginThrottle
from carpool.service.http.metrics import MetricsMiddleware
from carpool.service.http.problems import ProblemDetails, install_error_handlers

_DESCRIPTION = """Submit, watch and control training jobs. All jobs run as the daemon's Unix user.

Every error is a problem (RFC 9457, `application/problem+json`): what is wrong, where, and how to fix it.
On the daemon's Unix socket its own user needs no token; all other requests need `Authorization: Bearer TOKEN`."""


def make_app(context: ApiContext) -> FastAPI:
    """Build the application."""
    app = FastAPI(
        title="carpool",
        version=__version__,
        summary="Lets many deep-learning training jobs share GPUs.",
        description=_DESCRIPTION,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
    )
    app.state.context = context
    app.state.streams = streams.Streams(context.service, context.limits)
    app.state.login_throttle = LoginThrottle(context.limits, context.proxies)
    for router in (api.open_router, api.router, api.metrics_router, streams.router, login.router):
        app.include_router(router)
    context.metrics.add_service(context.service)
    install_error_handlers(app)
    _add_problem_schema(app)
    # Each middleware runs before those added earlier.
    app.add_middleware(BodyLimitMiddleware, limits=context.limits)
    app.add_middleware(AuthMiddleware, context=context, throttle=app.state.login_throttle)
    app.add_middleware(MetricsMiddleware, metrics=context.metrics)
    return app


def _add_problem_schema(app: FastAPI) -> None:
    """Add the schema of problems to the OpenAPI document: routes only reference it by name, which FastAPI ignores."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            problem = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs", {}))
            schemas["ProblemDetails"] = problem
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
