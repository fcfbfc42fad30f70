"""Event streams: server-sent events and followed logs, with their routes and per-caller limits."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from math import isfinite
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from carpool.service.auth import Caller, Principal
from carpool.service.http.api import COMMON_RESPONSES, JobName, bearer
from carpool.service.http.deps import PrincipalDep, caller_in
from carpool.service.http.limits import Limits
from carpool.service.http.problems import RequestRejected, responses
from carpool.service.queries.event_log import Event
from carpool.service.service import SchedulerService

_MAX_RENDERED = 8192  # events whose text is cached
_POLL_S = 0.25  # interval at which a followed log is read


class Streams:
    """Opens event streams and followed logs, limited in number per user and in duration."""

    def __init__(self, service: SchedulerService, limits: Limits) -> None:
        self._service = service
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._rendered: dict[tuple[int, str, bool], bytes] = {}

    def events(self, principal: Principal, after: int | None) -> StreamingResponse:
        """Stream the visible events with a number above `after`; only new ones when it is None."""
        return self.open(principal, self._events(principal, after), "text/event-stream")

    def log(self, principal: Principal, job: str, start: int) -> StreamingResponse:
        """Stream a job's log from a byte on until the job ends."""
        self._service.log(principal, job, start, most=4)  # raises NotFound before the response starts
        return self.open(principal, self._follow(principal, job, start), "text/plain; charset=utf-8")

    def open(self, principal: Principal, chunks: AsyncGenerator[bytes, None], media_type: str) -> StreamingResponse:
        name, limit = principal.name, self._limits.streams
        if self._open[name] >= limit:
            text = f"{name!r} has {self._open[name]} streams open; the limit is {limit}. Close one first."
            raise RequestRejected(429, text, headers={"Retry-After": "5"})
        return _CountedStream(self._open, name, chunks, media_type)

    async def _events(self, principal: Principal, after: int | None) -> AsyncGenerator[bytes, None]:
        """Yield batches of events, and a comment as heartbeat while there are none."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stream_s
        yield b": carpool\n\n"
        async with aclosing(self._service.event_batches(principal, after)) as batches:
            coming = asyncio.ensure_future(anext(batches, None))
            try:
                while (left_s := until - loop.time()) > 0.0:
                    await asyncio.wait({coming}, timeout=min(self._limits.heartbeat_s, left_s))
                    if not coming.done():
                        yield b": still here\n\n"
                        continue
                    batch = coming.result()
                    if batch is None:
                        return
                    if batch:
                        yield self._render(batch)
                    await asyncio.sleep(self._limits.batch_s)
                    coming = asyncio.ensure_future(anext(batches, None))
            finally:
                coming.cancel()
                await asyncio.wait({coming})

    async def _follow(self, principal: Principal, job: str, start: int) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.stream_s
        while loop.time() < until:
            chunk = await asyncio.to_thread(self._service.log, principal, job, start)
            if chunk.text:
                yield chunk.text.encode()
            if chunk.is_over:
                return
            if chunk.next == start or start < 0:
                await asyncio.sleep(_POLL_S)
            start = chunk.next

    def _render(self, batch: Iterable[Event]) -> bytes:
        """Render events, each once for all listeners that may see the same data."""
        if len(self._rendered) > _MAX_RENDERED:
            self._rendered.clear()
        texts = []
        for event in batch:
            key = event.number, event.kind, bool(event.data)  # data is empty for listeners that may not see it
            if key not in self._rendered:
                self._rendered[key] = as_sse(event)
            texts.append(self._rendered[key])
        return b"".join(texts)


class _CountedStream(StreamingResponse):
    """A stream that counts as open until it ends, and that ends when the caller's token is removed."""

    def __init__(self, counts: Counter[str], name: str, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(chunks, media_type=media_type, headers={"X-Accel-Buffering": "no"})
        self._counts, self._name, self._chunks = counts, name, chunks
        counts[name] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_in(scope)
        try:
            async with aclosing(self._chunks):
                if caller is not None:
                    self.body_iterator = _while_valid(self._chunks, caller)
                await super().__call__(scope, receive, send)
        finally:
            self._counts[self._name] -= 1
            if not self._counts[self._name]:
                del self._counts[self._name]


async def _while_valid(chunks: AsyncGenerator[bytes, None], caller: Caller) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        if not caller.is_valid():
            return
        yield chunk


def as_sse(event: Event) -> bytes:
    """Encode an event as a server-sent event."""
    data = {"number": event.number, "at": event.at, "kind": event.kind, "job": event.job, "data": event.data}
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(_finite(data))}\n\n".encode()


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
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
    "description": "One event: its number, its kind, and a JSON object with number, at, kind, job and data.",
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
            "description": "Server-sent events: submitted, phase, changed, progress, decision, told, evaluated, "
            "device, policy, late, missed. Comments keep an idle stream alive. It ends after an hour; reconnect then.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        }
    },
)
async def events(
    streams: StreamsDep,
    principal: PrincipalDep,
    after: Annotated[int | None, Query(ge=0, le=1 << 53, description="Number of the last event received.")] = None,
    last: Annotated[
        str, Header(alias="Last-Event-ID", max_length=20, pattern=r"^[0-9]*$", description="Overrides `after`.")
    ] = "",
) -> StreamingResponse:
    """Stream events as they happen."""
    return streams.events(principal, int(last) if last else after)


@router.get(
    "/jobs/{job}/log/follow",
    tags=["jobs"],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The log as text, until the job ends.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **responses(404),
    },
)
async def follow(
    job: JobName,
    streams: StreamsDep,
    principal: PrincipalDep,
    start: Annotated[int, Query(ge=-(1 << 53), le=1 << 53, description="First byte; negative: from the end.")] = 0,
) -> StreamingResponse:
    """Stream a job's log as it is written."""
    return streams.log(principal, job, start)
