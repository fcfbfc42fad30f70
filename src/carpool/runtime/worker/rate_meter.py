"""Rate meter: measures steps and samples per second and limits how often they are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from carpool.runtime.engine.trainer import StepDone
from carpool.runtime.process.protocol import Stepped

_EVERY_S = 0.2


class RateMeter:
    """Counts steps; due at the first of a formation, then after every fifth of a second.

    A probe is silent while as many steps warm up, then reports on exactly the steps asked for; from then on it is as
    ever.
    """

    def __init__(self, probe: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._due = 0.0
        self._steps = 0
        self._samples = 0
        self._warming = self._probe = probe

    def count(self, done: StepDone, metrics: Mapping[str, float]) -> Stepped | None:
        """Take a step into account; a report if one is due."""
        self._steps += 1
        self._samples += done.num_samples
        now = self._clock()
        if self._warming:
            self._warming -= 1
            if not self._warming:
                self._begin(now)
            return None
        if self._steps < self._probe or (not self._probe and now < self._due):
            return None
        seconds = max(now - self._since, 1e-9)
        report = Stepped(
            step=done.step,
            epoch=done.epoch,
            loss=done.loss,
            samples_per_s=self._samples / seconds,
            steps_per_s=self._steps / seconds,
            metrics=dict(metrics),
            probed=self._probe > 0,
        )
        self._probe = 0
        self._begin(now)
        return report

    def _begin(self, now: float) -> None:
        self._since, self._due = now, now + _EVERY_S
        self._steps = self._samples = 0
