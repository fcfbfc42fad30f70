"""Garbage-collector tuning: freezes long-lived objects to keep full collections short."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

_LONG_S = 0.01  # a full collection that takes longer
_AGAIN_S = 3600.0  # after which everything is walked once more
_EVERYTHING = 2  # the generation of a full collection


class GcFreezer:
    """While it is entered, a full collection walks what is new since the last one, not all there is.

    Everything that is alive is walked in a full collection: a tenth of a second in a daemon with 10,000 jobs, in which
    nobody is answered. Right after one there is no garbage, so if it took long what is there is put aside
    (`gc.freeze`). It is still freed when nobody refers to it any more; only cycles among it have to wait until all is
    walked again, which happens once an hour.
    """

    def __init__(
        self, long_s: float = _LONG_S, again_s: float = _AGAIN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._long_s = long_s
        self._again_s = again_s
        self._clock = clock
        self._walked_at = 0.0  # everything
        self._began = 0.0

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        self._walked_at = self._clock()
        gc.callbacks.append(self._noticed)

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._noticed)
        gc.unfreeze()

    def _noticed(self, phase: str, told: Mapping[str, Any]) -> None:
        if told["generation"] < _EVERYTHING:
            return
        now = self._clock()
        if phase == "stop":
            if now - self._began > self._long_s:
                gc.freeze()
            return
        self._began = now
        if now - self._walked_at > self._again_s:
            self._walked_at = now
            gc.unfreeze()
