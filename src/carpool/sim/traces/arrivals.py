"""When jobs are submitted: processes that turn a mean rate into instants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol


class Arrivals(Protocol):
    """A process of arrivals with a mean rate of its user's choosing."""

    @property
    def is_scalable(self) -> bool:
        """Whether stretching all its instants by one factor gives the same process at another rate."""

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """`count` instants in ascending order, the first at 0."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant rate."""

    is_scalable: ClassVar[bool] = True

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """Exponential gaps."""
        times, at = [0.0], 0.0
        for _ in range(count - 1):
            at -= math.log(1.0 - rng.random()) / rate_per_s
            times.append(at)
        return times


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All jobs at time 0."""

    is_scalable: ClassVar[bool] = True

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """Nothing to draw."""
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class Uniform:
    """Arrivals spread evenly at random over a span."""

    is_scalable: ClassVar[bool] = True

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """Sorted uniform instants over count / rate seconds."""
        span_s = count / rate_per_s
        return _from_zero([rng.random() * span_s for _ in range(count)])


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A rate that swings over the day: rate · (1 + swing · sin(2π t / period_s))."""

    swing: float = 0.8  # 0: constant; 1: no arrivals at night
    period_s: float = 86_400.0
    is_scalable: ClassVar[bool] = False

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """Candidates at the highest rate, thinned to the rate of the hour (Lewis and Shedler 1979)."""
        times: list[float] = []
        at, turn, peak = 0.0, 2 * math.pi / self.period_s, 1 + self.swing
        while len(times) < count:
            at -= math.log(1.0 - rng.random()) / (rate_per_s * peak)
            if rng.random() * peak <= 1 + self.swing * math.sin(turn * at):
                times.append(at)
        return _from_zero(times)


@dataclass(frozen=True, slots=True)
class Bursty:
    """Bursts at random instants, each of a geometric number of jobs close together (one user's sweep)."""

    burst: float = 10.0  # mean jobs in a burst
    width_s: float = 60.0  # mean distance of a job from its burst's start
    is_scalable: ClassVar[bool] = False

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """Poisson bursts at rate / burst, each job an exponential time after its burst's start."""
        times: list[float] = []
        at, goes_on = 0.0, 1 - 1 / self.burst
        while len(times) < count:
            at -= math.log(1.0 - rng.random()) * self.burst / rate_per_s
            times.append(at - math.log(1.0 - rng.random()) * self.width_s)
            while rng.random() < goes_on:
                times.append(at - math.log(1.0 - rng.random()) * self.width_s)
        return _from_zero(times[:count])


def _from_zero(times: list[float]) -> list[float]:
    """Sorted, and shifted so that the first is 0."""
    times.sort()
    first = times[0]
    return [at - first for at in times]


ARRIVALS: dict[str, type[Poisson] | type[AtOnce] | type[Uniform] | type[Diurnal] | type[Bursty]] = {
    "poisson": Poisson,
    "at-once": AtOnce,
    "uniform": Uniform,
    "diurnal": Diurnal,
    "bursty": Bursty,
}
