"""Random distributions of synthetic traces: arrival processes and run times."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol


class ArrivalProcess(Protocol):
    """A process of arrivals with a given mean rate."""

    @property
    def is_scalable(self) -> bool:
        """Whether multiplying its instants by a factor gives the same process at another rate."""

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        """`count` instants in ascending order, the first at 0."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant rate."""

    is_scalable: ClassVar[bool] = True

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
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
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class Uniform:
    """Arrivals spread evenly at random over a span."""

    is_scalable: ClassVar[bool] = True

    def draw(self, count: int, rate_per_s: float, rng: Random) -> list[float]:
        span_s = count / rate_per_s
        return _from_zero([rng.random() * span_s for _ in range(count)])


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A rate that varies over the day: rate · (1 + swing · sin(2π t / period_s))."""

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


_WEEK_S = 7 * 86_400.0


class LengthDistribution(Protocol):
    """A distribution of run times."""

    def draw(self, count: int, rng: Random) -> list[float]:
        """`count` independent run times in seconds."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(N(ln median_s, sigma²)), clipped."""

    median_s: float = 1800.0
    sigma: float = 1.5
    min_s: float = 1.0
    max_s: float = _WEEK_S

    def draw(self, count: int, rng: Random) -> list[float]:
        mu, low, high = math.log(self.median_s), self.min_s, self.max_s
        gauss, exp, sigma = rng.gauss, math.exp, self.sigma
        return [min(max(exp(gauss(mu, sigma)), low), high) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with a mean."""

    mean_s: float = 3600.0

    def draw(self, count: int, rng: Random) -> list[float]:
        mean_s, log, uniform = -self.mean_s, math.log, rng.random
        return [mean_s * log(1.0 - uniform()) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every job equally long."""

    length_s: float = 3600.0

    def draw(self, count: int, rng: Random) -> list[float]:
        return [self.length_s] * count


# (share of jobs, run time in s at most that long), measured on the 82,247 jobs of the Philly trace (CC BY 4.0).
_PHILLY_QUANTILES = (
    (0.0, 1.0), (0.01, 17.0), (0.05, 48.0), (0.1, 61.0), (0.2, 75.0), (0.3, 209.0), (0.4, 599.0), (0.5, 1144.0),
    (0.6, 1821.0), (0.7, 2549.0), (0.8, 4244.0), (0.9, 11266.0), (0.95, 43648.0), (0.98, 147876.0), (0.99, 254884.0),
    (0.995, 430658.0), (0.999, 1186475.0), (1.0, 4628226.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhillyLike:
    """Philly's heavy tail: its measured quantiles, joined by straight lines in log time; one in 100 runs for days."""

    max_s: float = math.inf  # clip, for example at a week

    def draw(self, count: int, rng: Random) -> list[float]:
        shares = [share for share, _ in _PHILLY_QUANTILES]
        logs = [math.log(length_s) for _, length_s in _PHILLY_QUANTILES]
        slopes = [
            (logs[place + 1] - logs[place]) / (shares[place + 1] - shares[place]) for place in range(len(shares) - 1)
        ]
        lengths: list[float] = []
        for _ in range(count):
            drawn = rng.random()
            place = bisect_right(shares, drawn) - 1
            lengths.append(min(math.exp(logs[place] + slopes[place] * (drawn - shares[place])), self.max_s))
        return lengths


LENGTHS: dict[str, type[Lognormal] | type[Exponential] | type[Fixed] | type[PhillyLike]] = {
    "philly": PhillyLike,
    "lognormal": Lognormal,
    "exponential": Exponential,
    "fixed": Fixed,
}
