"""FastAPI dependencies: the API's context, and how routes get the service and the caller of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import Depends, Request
from starlette.types import Scope

from carpool.backends.job_accounting import Json
from carpool.jobs.job_file import ListedJob
from carpool.service.auth import AccessTokens, AuthMethod, Caller, Principal, Role
from carpool.service.http.limits import Limits
from carpool.service.http.metrics import ServiceMetrics
from carpool.service.http.problems import RequestRejected
from carpool.service.http.submission import PathPolicy
from carpool.service.service import SchedulerService

CALLER = "caller"  # key in a scope's state, set by the auth middleware
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="carpool"'}


class Planner(Protocol):
    """Forecasts jobs as if they were submitted now."""

    async def plan(self, principal: Principal, jobs: Sequence[ListedJob]) -> Json:
        """Return the forecast, as ``carpool plan --json`` prints it; InputError when it is not possible."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Everything the API of one daemon needs."""

    service: SchedulerService
    tokens: AccessTokens
    owner: Principal = field(default_factory=lambda: Principal("owner", Role.ADMIN))  # the user who runs the daemon
    uid: int = -1  # the owner's; a peer of the Unix socket with this user id is the owner
    roots: PathPolicy = field(default_factory=lambda: PathPolicy((Path.home(),)))
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    origins: tuple[str, ...] = ()  # public addresses of reverse proxies
    proxies: tuple[str, ...] = ()  # IP addresses of reverse proxies, whose X-Forwarded-For is trusted
    limits: Limits = field(default_factory=Limits)
    planner: Planner | None = None
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)
    is_ready: Callable[[], bool] = lambda: True

    def roots_for(self, caller: Caller) -> PathPolicy | None:
        """Return the folders from which the caller may run jobs; None, any folder, for the daemon's own user."""
        return None if caller.method is AuthMethod.SOCKET else self.roots


def unauthenticated() -> RequestRejected:
    """Return the 401 error of a request without credentials."""
    text = "this request needs a token. Set CARPOOL_TOKEN, or send the header 'Authorization: Bearer TOKEN'."
    return RequestRejected(401, text, headers=CHALLENGE)


def caller_in(scope: Scope) -> Caller | None:
    """Return the caller of a request; None without credentials or without the auth middleware."""
    caller = scope.get("state", {}).get(CALLER)
    assert caller is None or isinstance(caller, Caller)
    return caller


def principal_of(request: Request) -> Principal:
    """Return the principal of a request; RequestRejected (401) without credentials."""
    return _require_caller(request).principal


def _require_caller(request: Request) -> Caller:
    caller = caller_in(request.scope)
    if caller is None:
        raise unauthenticated()
    return caller


# Dependencies are coroutines because FastAPI runs plain functions in a thread.
async def _context(request: Request) -> ApiContext:
    context = request.app.state.context
    assert isinstance(context, ApiContext)
    return context


async def _service(request: Request) -> SchedulerService:
    return (await _context(request)).service


async def _caller(request: Request) -> Caller:
    return _require_caller(request)


async def _principal(request: Request) -> Principal:
    return principal_of(request)


ContextDep = Annotated[ApiContext, Depends(_context)]
ServiceDep = Annotated[SchedulerService, Depends(_service)]
CallerDep = Annotated[Caller, Depends(_caller)]
PrincipalDep = Annotated[Principal, Depends(_principal)]
