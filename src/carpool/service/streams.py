"""What is told as it happens: events as server-sent events, and logs that are followed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from math import isfinite
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from carpool.service.clerk import Clerk
from carpool.service.door import Visitor, visitor_in
from carpool.service.feed import Event
from carpool.service.limits import Limits
from carpool.service.people import Person
from carpool.service.problems import Turned

_RENDERED = 8192  # events whose text is kept for the next listener
_LOOK_S = 0.25  # how often a followed log is looked at


class Streams:
    """Streams to people, so many to each and each for so long."""

    def __init__(self, clerk: Clerk, limits: Limits) -> None:
        self._clerk = clerk
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._rendered: dict[tuple[int, str, bool], bytes] = {}

    def events(self, who: Person, after: int | None) -> StreamingResponse:
        """Everything that somebody may see, behind an event's number or from now on."""
        return self.opened(who, lambda: self._tell(who, after), "text/event-stream")

    def log(self, who: Person, job: str, start: int) -> StreamingResponse:
        """A job's log from a byte on, until the job is over."""
        self._clerk.log(who, job, start, most=4)  # NotThere before anything is sent
        return self.opened(who, lambda: self._follow(who, job, start), "text/plain; charset=utf-8")

    def opened(
        self, who: Person, source: Callable[[], AsyncGenerator[bytes, None]], media_type: str
    ) -> StreamingResponse:
        """What a source tells, counted as one of the person's streams; turned away where that is one too many."""
        if self._open[who.name] >= self._limits.streams:
            text = f"{who.name!r} has {self._limits.streams} streams open. Close one first."
            raise Turned(429, text, headers={"Retry-After": "5"})
        return _Counted(self._open, who.name, source(), media_type)

    async def _tell(self, who: Person, after: int | None) -> AsyncGenerator[bytes, None]:
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

    async def _follow(self, who: Person, job: str, start: int) -> AsyncGenerator[bytes, None]:
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


class _Counted(StreamingResponse):
    """A stream that counts from now until it ends, however it does; one whose token was removed is told no more."""

    def __init__(self, counts: Counter[str], name: str, pieces: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(pieces, media_type=media_type, headers={"X-Accel-Buffering": "no"})
        self._counts, self._name, self._pieces = counts, name, pieces
        counts[name] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visitor = visitor_in(scope)
        try:
            async with aclosing(self._pieces):
                if visitor is not None:
                    self.body_iterator = _while_known(self._pieces, visitor)
                await super().__call__(scope, receive, send)
        finally:
            self._counts[self._name] -= 1
            if not self._counts[self._name]:
                del self._counts[self._name]


async def _while_known(pieces: AsyncGenerator[bytes, None], visitor: Visitor) -> AsyncGenerator[bytes, None]:
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
