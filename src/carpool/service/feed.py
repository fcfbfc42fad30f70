"""What happens in a daemon, as a numbered stream that any number of listeners follow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

_KEPT = 4096  # events that somebody who was away for a moment can still be told


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: to a job, or to the daemon where no job is named."""

    number: int
    at: float
    kind: str  # submitted, phase, changed, progress, decision, told, evaluated, device, policy, missed
    job: str = ""
    owner: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class Feed:
    """The newest events; listeners are woken together and read on by themselves, so a slow one holds nobody up.

    One who falls behind by more than is kept is told ``missed`` and goes on with what there is.
    """

    def __init__(self, first: int = 1, kept: int = _KEPT) -> None:
        self._next = first
        self._events: deque[Event] = deque(maxlen=kept)
        self._news = asyncio.Event()
        self._closed = False
        self.listeners = 0

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._next - 1

    def add(self, at: float, kind: str, job: str = "", owner: str = "", **data: Any) -> None:
        """Something happened."""
        self._events.append(Event(self._next, at, kind, job, owner, data))
        self._next += 1
        self._wake()

    def close(self) -> None:
        """Nothing more will happen: listeners come to their end."""
        self._closed = True
        self._wake()

    async def listen(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events behind a number, then those to come; from now on where no number is given."""
        async with aclosing(self.batches(after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """The same, as many at once as there are: who reads slowly is woken seldom."""
        seen = self.last if after is None else min(after, self.last)
        self.listeners += 1
        try:
            while True:
                news = self._news
                if batch := self._behind(seen):
                    seen = batch[-1].number
                    yield batch
                elif self._closed:
                    return
                else:
                    await news.wait()
        finally:
            self.listeners -= 1

    def _behind(self, seen: int) -> list[Event]:
        """Events behind a number, a copy; ``missed`` in the place of those that are not kept any more."""
        missing = self._next - 1 - seen
        if missing <= 0:
            return []
        oldest = self._next - len(self._events)
        if seen + 1 >= oldest:
            return list(self._events)[-missing:]
        return [Event(oldest - 1, self._events[0].at if self._events else 0.0, "missed"), *self._events]

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
