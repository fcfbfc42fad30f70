"""The web application over an office, and people who ask it: no sockets, no machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from carpool.service.allowances import Allowances
from carpool.service.app import make_app
from carpool.service.desk import Desk, Planner
from carpool.service.door import PEER
from carpool.service.limits import Limits
from carpool.service.people import Person, Role
from carpool.service.roots import Roots
from carpool.service.tokens import Tokens
from carpool.testing.office import Office, open_office

BASE = "http://localhost:7637"
UID = 4711  # the owner's
PEOPLE = {
    "ada": Person("ada"),
    "ben": Person("ben"),
    "root": Person("root", Role.ADMIN),
    "screen": Person("screen", Role.READER),
}
GENEROUS = Limits(requests_per_s=1e6, burst=1e6, strangers_burst=1e6, stream_s=0.2, gather_s=0.0)
ENTRY = "def main(lr=0.1):\n    ...\n"  # what train.py in the reception's folder holds


@dataclass(frozen=True, slots=True)
class Reception:
    """An application and clients of it: one for each of PEOPLE, one by the socket, one who is nobody."""

    app: FastAPI
    office: Office
    desk: Desk
    folder: Path  # where jobs may be; it holds train.py
    clients: Mapping[str, httpx.AsyncClient]

    def __getitem__(self, name: str) -> httpx.AsyncClient:
        return self.clients[name]

    def body(self, *names: str, **table: Any) -> dict[str, Any]:
        """A submission of jobs with these names."""
        return {
            "folder": str(self.folder),
            "job": [{"name": name, "entry": "train.py:main", **table} for name in names],
        }


@asynccontextmanager
async def open_reception(
    folder: Path,
    *,
    limits: Limits = GENEROUS,
    allowances: Allowances | None = None,
    planner: Planner | None = None,
) -> AsyncIterator[Reception]:
    """An application whose people have tokens."""
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text(ENTRY, encoding="utf-8")
    tokens = Tokens(folder / "tokens.json")
    secrets = {name: tokens.add(person, 0.0) for name, person in PEOPLE.items()}
    async with AsyncExitStack() as stack:
        office = await stack.enter_async_context(open_office(folder / "state", allowances=allowances))
        desk = Desk(
            office.clerk,
            tokens,
            owner=Person("owner", Role.ADMIN),
            uid=UID,
            roots=Roots((folder / "work",)),
            limits=limits,
            planner=planner,
        )
        app = make_app(desk)
        clients = {name: _client(app, secrets[name]) for name in PEOPLE}
        clients["nobody"] = _client(app)
        clients["owner"] = _client(_by_socket(app, UID))
        for client in clients.values():
            await stack.enter_async_context(client)
        yield Reception(app, office, desk, folder / "work", clients)


def _client(app: Any, token: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, headers=headers)


def _by_socket(app: Any, uid: int) -> Any:
    """The application as somebody at a Unix socket sees it."""

    async def seen(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {PEER: uid}}, receive, send)

    return seen
