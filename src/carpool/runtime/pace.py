"""How fast a worker goes, told a few times a second at most."""

from __future__ import annotations

import time
from collections.abc import Mapping

from carpool.runtime.protocol import Stepped
from carpool.runtime.trainer import StepDone

_EVERY_S = 0.2


class Pace:
    """Counts steps; due at the first of a formation, then after every fifth of a second."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._due = 0.0
        self._steps = 0
        self._samples = 0

    def count(self, done: StepDone, metrics: Mapping[str, float]) -> Stepped | None:
        """Take a step into account; a report if one is due."""
        self._steps += 1
        self._samples += done.num_samples
        now = time.perf_counter()
        if now < self._due:
            return None
        seconds = max(now - self._since, 1e-9)
        report = Stepped(
            step=done.step,
            epoch=done.epoch,
            loss=done.loss,
            samples_per_s=self._samples / seconds,
            steps_per_s=self._steps / seconds,
            metrics=dict(metrics),
        )
        self._since, self._due = now, now + _EVERY_S
        self._steps = self._samples = 0
        return report
