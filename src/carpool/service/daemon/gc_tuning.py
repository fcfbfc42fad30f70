"""Garbage-collector tuning: freezes long-lived objects to keep full collections short."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

_SLOW_S = 0.01  # a full collection that takes longer freezes all objects
_RESCAN_S = 3600.0  # after which all objects are scanned once more
_FULL = 2  # the generation of a full collection


class GcFreezer:
    """While entered, a full collection scans only objects created since the last slow one.

    A full collection of a daemon with 10,000 jobs blocks it for a tenth of a second. Right after a slow one there is no
    garbage, so all objects are frozen (`gc.freeze`). Frozen objects are still freed by reference counting; cycles among
    them wait for the hourly scan.
    """

    def __init__(
        self, slow_s: float = _SLOW_S, rescan_s: float = _RESCAN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slow_s = slow_s
        self._rescan_s = rescan_s
        self._clock = clock
        self._scanned_at = 0.0  # all objects
        self._began = 0.0

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        self._scanned_at = self._clock()
        gc.callbacks.append(self._on_collection)

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._on_collection)
        gc.unfreeze()

    def _on_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] < _FULL:
            return
        now = self._clock()
        if phase == "stop":
            if now - self._began > self._slow_s:
                gc.freeze()
            return
        self._began = now
        if now - self._scanned_at > self._rescan_s:
            self._scanned_at = now
            gc.unfreeze()
