"""Market-clearing prices: what a device-second of each kind is worth, and what each job would take at that price.

A price μ_k is counted in weighted job-seconds of delay per second of a device of kind k. An option o takes c_o devices
(of each kind) and lets job j get on at g_j(o). Two rules follow from each other:

    worth of a unit of work    λ_j = min over o of (w_j + ρ_j · μ·c_o) / g_j(o)
    what job j would take      the o with the largest λ_j · g_j(o) − μ·c_o, if that is above 0

A unit of j's work less lets j end sooner by 1/g_j(o): that saves w_j itself, and hands c_o devices to those who are
still there when j ends, at the price of that time, ρ_j · μ. Prices clear the market: they are the lowest at which jobs
take no more than there is. Devices that nobody would wait for cost nothing.

How the price falls: it is carried by the weight of those who compete, so ρ_j is the part of all weight that is left
when j ends (`ends`). For gangs of one width that gives shortest remaining time over weight first; for a batch with
rates k^p it comes within about one per cent of heSRPT, the optimum (Berg, Vesilo, Harchol-Balter 2020). Where jobs keep
arriving, a part of those who leave is replaced, and prices fall less.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_OCTAVES = 24  # between the least and the highest price that could clear a market
_COARSE, _MANY, _FEW = 8, 8, 4  # bisections: over all octaves, then for each kind of a small and of a large market
_CLOSER, _ROUGHLY = (3.0, 2.0, 1.2), (1.6,)  # how far off the prices found so far may be, in small and in large ones
_LITTLE = (1.2,)  # how far the direction of prices may be off, where it is known
_FINE = 12  # bisections along a direction
_LARGE = 50_000  # jobs × options
_NEVER = 1e-30  # a rate so low that it is none


@dataclass(frozen=True, slots=True)
class Market:
    """Jobs in rows, options in columns, kinds of devices in the columns of `needs`."""

    rates: Floats  # [job, option] believed units of work per second; 0: not possible
    needs: Floats  # [option, kind] devices that an option takes
    supply: Floats  # [kind] devices there are
    weights: Floats  # [job]
    work: Floats  # [job] units of work left
    per_unit: Floats = field(init=False, repr=False)  # [job, option] seconds for a unit of work

    def __post_init__(self) -> None:
        """Invert the rates once: every price that is tried needs them."""
        object.__setattr__(self, "per_unit", 1.0 / np.maximum(self.rates, _NEVER))

    @property
    def is_large(self) -> bool:
        """Whether prices can be found only roughly in the time there is."""
        return self.rates.size > _LARGE

    def worths(self, prices: Floats, parts: Floats) -> Floats:
        """λ: what a unit of each job's work is worth, if its devices are worth `parts` of the prices when it ends."""
        paid = parts[:, None] * (self.needs @ prices)
        paid += self.weights[:, None]
        paid *= self.per_unit
        return np.asarray(paid.min(axis=1))

    def seconds(self) -> Floats:
        """[job, option]: time to the end."""
        return np.asarray(self.work[:, None] * self.per_unit)

    def bills(self, prices: Floats) -> Floats:
        """What a job's completion costs all together per its own weight, in seconds: its place in the order of ends."""
        return np.asarray(self.work * self.worths(prices, np.ones(len(self.work))) / self.weights)

    def taken(self, prices: Floats, parts: Floats) -> Floats:
        """[kind]: devices that are wanted at these prices."""
        costs = self.needs @ prices
        surplus = self.worths(prices, parts)[:, None] * self.rates
        surplus -= costs
        best = surplus.argmax(axis=1)
        wanted = surplus[np.arange(len(best)), best] > 0.0
        counts = np.bincount(best[wanted], minlength=len(costs)).astype(np.float64)
        return np.asarray(counts @ self.needs)

    def clear(self, parts: Floats, near: Floats | None = None, along: Floats | None = None) -> Floats:
        """The lowest prices at which no kind is wanted by more jobs than it can serve.

        Bisection in the logarithm, over everything unless the prices are `near` some others, with all kinds at once.
        What one kind costs moves demand to the others, so the kinds are then gone through one after another. Where it
        is known what kinds cost against each other (`along`, see `outlook`), each is moved a little only: then a kind
        may be wanted by more jobs than it can serve, who would rather wait for it than take another.
        """
        factors, steps = (_ROUGHLY, _FEW) if self.is_large else (_CLOSER, _MANY)
        if along is not None:
            found, factors, steps = self._level(parts, along / along.max(), near), _LITTLE, _FEW
        elif near is not None:
            found = near
        else:
            most = np.full(len(self.supply), 2.0 * self.weights.sum())
            found = self._bisect(parts, most * 2.0**-_OCTAVES, most, _COARSE)
        for factor in factors:
            for kind in range(len(self.supply)):
                around = np.where(np.arange(len(self.supply)) == kind, factor, 1.0)
                found = self._bisect(parts, found / around, found * around, steps)
        return found

    def _level(self, parts: Floats, along: Floats, near: Floats | None) -> Floats:
        """Of the prices in one direction the lowest at which all that is wanted is worth no more than all there is."""
        high = 2.0 * float(self.weights.sum()) if near is None else float(near.max()) * _CLOSER[0]
        low = high * 2.0**-_OCTAVES if near is None else high / _CLOSER[0] ** 2
        there = along @ self.supply
        for _ in range(_FINE):
            middle = (low * high) ** 0.5
            is_short = along @ self.taken(middle * along, parts) > there
            low, high = (middle, high) if is_short else (low, middle)
        return high * along

    def _bisect(self, parts: Floats, low: Floats, high: Floats, steps: int) -> Floats:
        """The upper ends of the brackets that are left."""
        is_open = low < high
        for _ in range(steps):
            middle = np.sqrt(low * high)
            is_short = (self.taken(middle, parts) > self.supply) & is_open
            low, high = np.where(is_short, middle, low), np.where(is_short, high, middle)
        return high


def ends(bills: Floats, weights: Floats, replaced: Floats | float = 0.0) -> Floats:
    """ρ: the part of all weight that is there when each job ends, if jobs end in the order of their bills.

    `replaced` [job] is the part of those who have left by then whose place newcomers have taken.
    """
    order = np.argsort(-bills, kind="stable")
    longer = np.empty(len(bills))
    longer[order] = np.cumsum(weights[order]) - weights[order]
    shorter = weights.sum() - longer - weights
    return np.asarray((longer + replaced * shorter) / weights.sum())
