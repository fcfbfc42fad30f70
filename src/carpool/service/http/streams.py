"""Event streams: server-sent events and followed logs, with their routes and per-caller limits."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from math import isfinite
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from carpool.service.auth import Principal
from carpool.service.http.api import COMMON_RESPONSES, JobName, bearer
from carpool.service.http.auth_middleware import Caller, caller_in
from carpool.service.http.deps import PrincipalDep
from carpool.service.http.limits import Limits
from carpool.service.http.problems import RequestRejected, responses
from carpool.service.queries.event_log import Event
from carpool.service.service import SchedulerService

_RENDERED = 8192  # events whose text is kept for the next listener
_LOOK_S = 0.25  # how often a followed log is looked at


class Streams:
    """Streams to people, so many to each and each for so long."""

    def __init__(self, clerk: SchedulerService, limits: Limits) -> None:
        self._clerk = clerk
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._rendered: dict[tuple[int, str, bool], bytes] = {}

    def events(self, who: Principal, after: int | None) -> StreamingResponse:
        """Everything that somebody may see, behind an event's number or from now on."""
        return self.opened(who, lambda: self._tell(who, after), "text/event-stream")

    def log(self, who: Principal, job: str, start: int) -> StreamingResponse:
        """A job's log from a byte on, until the job is over."""
        self._clerk.log(who, job, start, most=4)  # NotThere before anything is sent
        return self.opened(who, lambda: self._follow(who, job, start), "text/plain; charset=utf-8")

    def opened(
        self, who: Principal, source: Callable[[], AsyncGenerator[bytes, None]], media_type: str
    ) -> StreamingResponse:
        """What a source tells, counted as one of the person's streams; turned away where that is one too many."""
        if self._open[who.name] >= self._limits.streams:
            text = f"{who.name!r} has {self._limits.streams} streams open. Close one first."
            raise RequestRejected(429, text, headers={"Retry-After": "5"})
        return _CountedStream(self._open, who.name, source(), media_type)

    async def _tell(self, who: Principal, after: int | None) -> AsyncGenerator[bytes, None]:
        """Batches of events; a comment where there is nothing to tell, so that both ends know that the line stands."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stream_s
        yield b": carpool\n\n"
        async with aclosing(self._clerk.news(who, after)) as news:
            coming = asyncio.ensure_future(anext(news, None))
            try:
                while (left_s := until - loop.time()) > 0.0:
                    await asyncio.wait({coming}, timeout=min(self._limits.beat_s, left_s))
                    if not coming.done():
                        yield b": still here\n\n"
                        continue
                    batch = coming.result()
                    if batch is None:
                        return
                    if batch:
                        yield self._render(batch)
                    await asyncio.sleep(self._limits.gather_s)  # what happens meanwhile goes out together
                    coming = asyncio.ensure_future(anext(news, None))
            finally:
                coming.cancel()
                await asyncio.wait({coming})

    async def _follow(self, who: Principal, job: str, start: int) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stream_s
        while loop.time() < until:
            piece = self._clerk.log(who, job, start)
            if piece.text:
                yield piece.text.encode()
            if piece.is_over:
                return
            if piece.next == start or start < 0:
                await asyncio.sleep(_LOOK_S)
            start = piece.next

    def _render(self, batch: Iterable[Event]) -> bytes:
        """Events as text; most are the same for many listeners, so they are written once."""
        if len(self._rendered) > _RENDERED:
            self._rendered.clear()
        found = []
        for event in batch:
            key = event.number, event.kind, bool(event.data)  # without data it is what others may see of it
            text = self._rendered.get(key)
            if text is None:
                text = self._rendered[key] = as_sse(event)
            found.append(text)
        return b"".join(found)


class _CountedStream(StreamingResponse):
    """A stream that counts from now until it ends, however it does; one whose token was removed is told no more."""

    def __init__(self, counts: Counter[str], name: str, pieces: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(pieces, media_type=media_type, headers={"X-Accel-Buffering": "no"})
        self._counts, self._name, self._pieces = counts, name, pieces
        counts[name] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor = caller_in(scope)
        try:
            async with aclosing(self._pieces):
                if visitor is not None:
                    self.body_iterator = _while_known(self._pieces, visitor)
                await super().__call__(scope, receive, send)
        finally:
            self._counts[self._name] -= 1
            if not self._counts[self._name]:
                del self._counts[self._name]


async def _while_known(pieces: AsyncGenerator[bytes, None], visitor: Caller) -> AsyncGenerator[bytes, None]:
    async for piece in pieces:
        if not visitor.is_known():
            return
        yield piece


def as_sse(event: Event) -> bytes:
    """One event on the wire."""
    data = {"number": event.number, "at": event.at, "kind": event.kind, "job": event.job, "data": event.data}
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(_finite(data))}\n\n".encode()


def _finite(value: Any) -> Any:
    """The value with nothing in the place of what is no number: JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


router = APIRouter(prefix="/v1", dependencies=[Depends(bearer)], responses=COMMON_RESPONSES)


async def _streams(request: Request) -> Streams:
    streams = request.app.state.streams
    assert isinstance(streams, Streams)
    return streams


StreamsDep = Annotated[Streams, Depends(_streams)]
_EVENT = {
    "type": "object",
    "description": "One event: its number, its kind, and as data a JSON object with number, at, kind, job and data.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["id", "event", "data"],
    "example": {
        "id": "7",
        "event": "phase",
        "data": '{"number": 7, "at": 1.7e9, "kind": "phase", "job": "mlp", "data": {"phase": "running"}}',
    },
}


@router.get(
    "/events",
    tags=["daemon"],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events: submitted, phase, progress, decision, told, evaluated, device, policy, "
            "late, missed. Comments keep a silent stream alive; it ends after an hour, and clients come back.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        }
    },
)
async def events(
    streams: StreamsDep,
    who: PrincipalDep,
    after: Annotated[int | None, Query(ge=0, le=1 << 53, description="The number of the last event known.")] = None,
    last: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, pattern=r"^[0-9]*$", description="The same; it counts more.")
    ] = "",
) -> StreamingResponse:
    """What happens, as it happens."""
    return streams.events(who, int(last) if last else after)


@router.get(
    "/jobs/{job}/log/follow",
    tags=["jobs"],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The log as text, until the job is over.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **responses(404),
    },
)
async def follow(
    job: JobName,
    streams: StreamsDep,
    who: PrincipalDep,
    start: Annotated[int, Query(ge=-(1 << 53), le=1 << 53, description="First byte; below 0 from the end.")] = 0,
) -> StreamingResponse:
    """A job's log as it is written."""
    return streams.log(who, job, start)
