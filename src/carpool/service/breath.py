"""How long a policy waits before it is asked again, so that a daemon answers people whatever deciding takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_SHARE = 0.2  # of the time may go into deciding
_AT_ONCE_S = 0.1  # of deciding, before anybody waits
_QUICK_S = 0.001  # of computing: what takes less counts for nothing


class Beginning(NamedTuple):
    """When something began, on the clock and in computing."""

    at_s: float
    computed_s: float


class Breath:
    """Deciding takes a fifth of the time at most.

    Time to decide comes in steadily and is kept up to a tenth of a second; a plan spends what it took on the clock,
    which is more than it computes where others keep the machine busy. Whoever has spent more than there was waits until
    it has come in again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, computed: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._computed = computed
        self._left_s = _AT_ONCE_S
        self._as_of = clock()

    def begin(self) -> Beginning:
        """Before a plan that may be made."""
        return Beginning(self._clock(), self._computed())

    def after(self, began: Beginning) -> float:
        """After it: seconds until the next one."""
        now = self._clock()
        if self._computed() - began.computed_s > _QUICK_S:
            kept_s = min(_AT_ONCE_S, self._left_s + _SHARE * (began.at_s - self._as_of))
            self._left_s = kept_s - (1.0 - _SHARE) * (now - began.at_s)  # it comes in meanwhile too
            self._as_of = now
        return max(0.0, -self._left_s) / _SHARE
