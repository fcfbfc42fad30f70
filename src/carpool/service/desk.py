"""What the API stands on, and how its routes reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import Depends, Request

from carpool.backends.documents import Json
from carpool.runtime.jobfile import Listed
from carpool.service.clerk import Clerk
from carpool.service.door import By, Visitor, person_of, visitor_of
from carpool.service.limits import Limits
from carpool.service.meters import Meters
from carpool.service.people import Person, Role
from carpool.service.roots import Roots
from carpool.service.tokens import AccessTokens


class Planner(Protocol):
    """Says what would become of jobs if they were submitted now."""

    async def foresee(self, who: Person, jobs: Sequence[Listed]) -> Json:
        """The plan, as ``carpool plan --json`` prints it; InputError where it cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """Everything behind the API of one daemon."""

    clerk: Clerk
    tokens: AccessTokens
    owner: Person = field(default_factory=lambda: Person("owner", Role.ADMIN))  # who runs the daemon
    uid: int = -1  # the owner's; whoever has it and comes by the socket is the owner
    roots: Roots = field(default_factory=lambda: Roots((Path.home(),)))
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    origins: tuple[str, ...] = ()  # by which a proxy before the daemon is known
    proxies: tuple[str, ...] = ()  # addresses of proxies, who say where requests are from
    limits: Limits = field(default_factory=Limits)
    planner: Planner | None = None
    meters: Meters = field(default_factory=Meters)
    is_ready: Callable[[], bool] = lambda: True

    def roots_for(self, visitor: Visitor) -> Roots | None:
        """Where somebody's jobs may be; the daemon's own user may do all that it may."""
        return None if visitor.by is By.SOCKET else self.roots


async def _desk(request: Request) -> Desk:
    desk = request.app.state.desk
    assert isinstance(desk, Desk)
    return desk


async def _clerk(request: Request) -> Clerk:
    return (await _desk(request)).clerk


async def _visitor(request: Request) -> Visitor:
    return visitor_of(request)


async def _person(request: Request) -> Person:
    return person_of(request)


# Coroutines, although they wait for nothing: others would be sent to a thread.
TheDesk = Annotated[Desk, Depends(_desk)]
TheClerk = Annotated[Clerk, Depends(_clerk)]
TheVisitor = Annotated[Visitor, Depends(_visitor)]
Who = Annotated[Person, Depends(_person)]
