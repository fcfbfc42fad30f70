"""How long a worker took to be ready for its first step, and what for."""

from __future__ import annotations

import time
from collections.abc import Callable


class ArrivalClock:
    """A clock that starts with the job's `Begin`, and what it showed on the way."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._spans: list[tuple[str, float]] = []

    def passed(self, what: str) -> None:
        """Something has just been done."""
        now = self._clock()
        self._spans.append((what, now - self._last))
        self._last = now

    def words(self) -> str:
        """For the job's story."""
        parts = ", ".join(f"{seconds:.3f} s {what}" for what, seconds in self._spans)
        return f"ready after {self._last - self._began:.3f} s: {parts}"
