"""FastAPI dependencies: the API's context, and how routes get the service and the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import Depends, Request

from carpool.backends.job_accounting import Json
from carpool.jobs.job_file import ListedJob
from carpool.service.auth import AccessTokens, Principal, Role
from carpool.service.http.auth_middleware import AuthMethod, Caller, caller_of, principal_of
from carpool.service.http.limits import Limits
from carpool.service.http.metrics import ServiceMetrics
from carpool.service.http.submission import PathPolicy
from carpool.service.service import SchedulerService


class Planner(Protocol):
    """Says what would become of jobs if they were submitted now."""

    async def foresee(self, who: Principal, jobs: Sequence[ListedJob]) -> Json:
        """The plan, as ``carpool plan --json`` prints it; InputError where it cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Everything behind the API of one daemon."""

    clerk: SchedulerService
    tokens: AccessTokens
    owner: Principal = field(default_factory=lambda: Principal("owner", Role.ADMIN))  # who runs the daemon
    uid: int = -1  # the owner's; whoever has it and comes by the socket is the owner
    roots: PathPolicy = field(default_factory=lambda: PathPolicy((Path.home(),)))
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    origins: tuple[str, ...] = ()  # by which a proxy before the daemon is known
    proxies: tuple[str, ...] = ()  # addresses of proxies, who say where requests are from
    limits: Limits = field(default_factory=Limits)
    planner: Planner | None = None
    meters: ServiceMetrics = field(default_factory=ServiceMetrics)
    is_ready: Callable[[], bool] = lambda: True

    def roots_for(self, visitor: Caller) -> PathPolicy | None:
        """Where somebody's jobs may be; the daemon's own user may do all that it may."""
        return None if visitor.by is AuthMethod.SOCKET else self.roots


async def _desk(request: Request) -> ApiContext:
    desk = request.app.state.desk
    assert isinstance(desk, ApiContext)
    return desk


async def _clerk(request: Request) -> SchedulerService:
    return (await _desk(request)).clerk


async def _visitor(request: Request) -> Caller:
    return caller_of(request)


async def _person(request: Request) -> Principal:
    return principal_of(request)


# Coroutines, although they wait for nothing: others would be sent to a thread.
ContextDep = Annotated[ApiContext, Depends(_desk)]
ServiceDep = Annotated[SchedulerService, Depends(_clerk)]
CallerDep = Annotated[Caller, Depends(_visitor)]
PrincipalDep = Annotated[Principal, Depends(_person)]
