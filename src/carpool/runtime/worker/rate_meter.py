"""Rate meter: measures steps and samples per second and limits how often they are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from carpool.runtime.engine.trainer import StepDone
from carpool.runtime.process.protocol import Stepped

_REPORT_EVERY_S = 0.2


class RateMeter:
    """Counts steps and samples; reports the first step, then five times a second.

    With ``probe``, the first report covers exactly that many steps, after as many warm-up steps.
    """

    def __init__(self, probe: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._due = 0.0
        self._steps = 0
        self._samples = 0
        self._warmup_left = self._probe = probe

    def count(self, done: StepDone, metrics: Callable[[], Mapping[str, float]]) -> Stepped | None:
        """Count a step; ``metrics`` is called if a report is due, because reading metrics waits for the device."""
        self._steps += 1
        self._samples += done.num_samples
        now = self._clock()
        if self._warmup_left:
            self._warmup_left -= 1
            if not self._warmup_left:
                self._restart(now)
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
            metrics=dict(metrics()),
            probed=self._probe > 0,
        )
        self._probe = 0
        self._restart(now)
        return report

    def _restart(self, now: float) -> None:
        self._since, self._due = now, now + _REPORT_EVERY_S
        self._steps = self._samples = 0
