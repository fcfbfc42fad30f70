"""Number formatting: durations in s, min, h or d, with consistent digits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """A unit of time; `seconds` of it make one."""

    name: str
    seconds: float


SECOND, MINUTE, HOUR, DAY = TimeUnit("s", 1.0), TimeUnit("min", 60.0), TimeUnit("h", 3600.0), TimeUnit("d", 86400.0)
FROM = ((2 * DAY.seconds, DAY), (1.5 * HOUR.seconds, HOUR), (2 * MINUTE.seconds, MINUTE))


def unit_for(values_s: Iterable[float]) -> TimeUnit:
    """The largest unit in which the smallest positive value is still readable, so that a column can share it."""
    positive = [value for value in values_s if value > 0 and math.isfinite(value)]
    if not positive:
        return SECOND
    smallest = min(positive)
    return next((unit for least, unit in FROM if smallest >= least), SECOND)


def digits(value: float) -> str:
    """Three significant digits, a thousands separator, no exponent: 0.0123, 1.23, 12.3, 123, 12,345."""
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:,.{min(6, max(0, 2 - magnitude))}f}"


def duration(seconds: float) -> str:
    """A duration on its own, with its unit."""
    unit = unit_for([abs(seconds)])
    return f"{digits(seconds / unit.seconds)} {unit.name}"
