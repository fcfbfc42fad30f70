"""Event queue ordered by time, priority and insertion, so that every run breaks ties alike."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from carpool.core.messages import Fact

EventCallback = Callable[[float], Fact | None]  # called at its time; None: the event has become void

MACHINES, FAILURES, ARRIVALS = 0, 1, 2  # priorities of events of one instant


class EventQueue:
    """Future events, in order."""

    __slots__ = ("_counter", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, EventCallback]] = []
        self._counter = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float | None:
        """When the next event is due; it may be void by then."""
        return self._heap[0][0] if self._heap else None

    def add(self, at: float, priority: int, callback: EventCallback) -> None:
        heappush(self._heap, (at, priority, next(self._counter), callback))

    def happen(self, at: float) -> list[Fact]:
        """The facts of all events due by `at`, by time, priority and insertion; the scheduler orders them anew."""
        heap = self._heap
        facts = []
        while heap and heap[0][0] <= at:
            fact = heappop(heap)[3](at)
            if fact is not None:
                facts.append(fact)
        return facts
