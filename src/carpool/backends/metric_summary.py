"""Metric summaries: the last, lowest and highest value of each metric of a job, with their steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from carpool.core.typed_fields import Amount, Measured, decode_value
from carpool.jobs.untrusted_file import open_untrusted

LOSS = "loss"  # of training; an evaluated metric of this name replaces it
_MAX_NAMES = 64
_MAX_BYTES = 1 << 26  # of a file that are read, its last ones


class MetricPoint(NamedTuple):
    """A value of a metric after a step."""

    step: int
    value: float


class MetricSummary(NamedTuple):
    """The extremes of one metric; values that are not finite count as last only."""

    last: MetricPoint
    low: MetricPoint | None = None
    high: MetricPoint | None = None

    def best(self, *, is_max: bool) -> MetricPoint | None:
        return self.high if is_max else self.low

    def followed_by(self, point: MetricPoint) -> MetricSummary:
        if not isfinite(point.value):
            return self._replace(last=point)
        low = point if self.low is None or point.value < self.low.value else self.low
        high = point if self.high is None or point.value > self.high.value else self.high
        return MetricSummary(point, low, high)


class MetricSummaries:
    """Summaries by name, folded point by point; of at most 64 names."""

    def __init__(self) -> None:
        self.by_name: dict[str, MetricSummary] = {}
        self._evaluates_loss = False

    def add_loss(self, step: float, loss: float | None) -> None:
        """Add the loss of training."""
        if loss is not None and not self._evaluates_loss:
            self._add(LOSS, MetricPoint(int(step), loss))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add evaluated metrics."""
        if LOSS in metrics and not self._evaluates_loss:
            self._evaluates_loss = True
            self.by_name.pop(LOSS, None)
        for name, value in metrics.items():
            self._add(name, MetricPoint(step, value))

    @property
    def last(self) -> dict[str, float]:
        """The last value of every evaluated metric."""
        skipped = () if self._evaluates_loss else (LOSS,)
        return {name: found.last.value for name, found in self.by_name.items() if name not in skipped}

    @property
    def last_step(self) -> int:
        return max((found.last.step for found in self.by_name.values()), default=0)

    def _add(self, name: str, point: MetricPoint) -> None:
        known = self.by_name.get(name)
        if known is not None or len(self.by_name) < _MAX_NAMES:
            self.by_name[name] = (known or MetricSummary(point)).followed_by(point)


class MetricReport(NamedTuple):
    """One line of a ``metrics.jsonl``."""

    step: int
    loss: float | None
    metrics: Mapping[str, float]


def read_metric_reports(path: Path) -> Iterator[MetricReport]:
    """The lines of a ``metrics.jsonl``; invalid lines are skipped, since the job can write anything into it."""
    try:
        with os.fdopen(open_untrusted(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MAX_BYTES))
            for line in file.read(_MAX_BYTES).splitlines():
                if (report := _report(line)) is not None:
                    yield report
    except OSError:
        return


def _report(line: bytes) -> MetricReport | None:
    try:
        row = json.loads(line)
        step = decode_value(Amount, row["step"], "row.step")
        loss = decode_value(Measured | None, row.get("loss"), "row.loss")
        metrics = decode_value(Mapping[str, Measured], row.get("metrics") or {}, "row.metrics")
        return MetricReport(int(step), loss, metrics)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_summaries(path: Path) -> MetricSummaries:
    """The summaries of a ``metrics.jsonl``."""
    summaries = MetricSummaries()
    for report in read_metric_reports(path):
        summaries.add_loss(report.step, report.loss)
        summaries.add(report.step, report.metrics)
    return summaries
