"""What happens in a daemon, as a numbered stream that any number of listeners follow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

_KEPT = 4096  # events that somebody who was away for a moment can still be told
_PER_EPOCH = 10**9  # more than ever happen between two starts; epochs stay below 2**53 / 10**9, nine million


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

    One who falls behind by more than is kept is told ``missed`` and goes on with what there is. So is one who has a
    number of an earlier start: each start counts its events from its own `epoch` on, and goes on with what has happened
    since `begin`.
    """

    def __init__(self, epoch: int = 0, kept: int = _KEPT) -> None:
        self._first = self._next = self._begun = epoch * _PER_EPOCH + 1
        self._events: deque[Event] = deque(maxlen=kept)
        self._news = asyncio.Event()
        self._closed = False
        self.listeners = 0

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._next - 1

    @property
    def count(self) -> int:
        """Events so far."""
        return self._next - self._first

    @property
    def _oldest(self) -> int:
        return self._next - len(self._events)

    def begin(self) -> None:
        """What was added until now had happened before this start."""
        self._begun = self._next

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
        """Events behind a number, 0 for all, then those to come; from now on where no number is given."""
        async with aclosing(self.batches(after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """The same, as many at once as there are: whoever reads slowly is woken seldom."""
        seen = self.last if after is None else after or self._first - 1
        self.listeners += 1
        try:
            if not self._first - 1 <= seen <= self.last:
                seen = self._begun - 1
                if seen + 1 >= self._oldest:  # else they are told below
                    yield [self._missed(seen)]
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
        if seen + 1 >= self._oldest:
            return list(self._events)[-missing:]
        return [self._missed(self._oldest - 1), *self._events]

    def _missed(self, number: int) -> Event:
        return Event(number, self._events[0].at if self._events else 0.0, "missed")

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
