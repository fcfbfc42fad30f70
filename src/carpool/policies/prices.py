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
Places = NDArray[np.intp]

_OCTAVES = 24  # between the least and the highest price that could clear a market
_COARSE, _MANY, _FEW = 8, 8, 4  # bisections: over all octaves, then for each kind of a small and of a large market
_CLOSER, _ROUGHLY = (3.0, 2.0, 1.2), (1.6,)  # how far off the prices found so far may be, in small and in large ones
_LITTLE = (1.2,)  # how far the direction of prices may be off, where it is known
_FINE = 12  # bisections along a direction
_LARGE = 50_000  # jobs × options
_SMALL = 5_000  # jobs × options, below which sorting jobs by what they may take does not pay
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
    _blocks: list[_Block] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Invert the rates and sort the jobs by what they may take, once: every price that is tried needs both."""
        object.__setattr__(self, "per_unit", 1.0 / np.maximum(self.rates, _NEVER))
        object.__setattr__(self, "_blocks", _blocks(self.rates, self.per_unit, self.weights))

    @property
    def is_large(self) -> bool:
        """Whether prices can be found only roughly in the time there is."""
        return self.rates.size > _LARGE

    def worths(self, prices: Floats, parts: Floats) -> Floats:
        """λ: what a unit of each job's work is worth, if its devices are worth `parts` of the prices when it ends."""
        found = np.empty(len(self.work))
        costs = self.needs @ prices
        for block in self._blocks:
            found[block.jobs] = block.worths(costs, parts)
        return found

    def seconds(self) -> Floats:
        """[job, option]: time to the end."""
        return np.asarray(self.work[:, None] * self.per_unit)

    def bills(self, prices: Floats) -> Floats:
        """What a job's completion costs all together per its own weight, in seconds: its place in the order of ends."""
        return np.asarray(self.work * self.worths(prices, np.ones(len(self.work))) / self.weights)

    def taken(self, prices: Floats, parts: Floats) -> Floats:
        """[kind]: devices that are wanted at these prices."""
        costs = self.needs @ prices
        counts = np.zeros(len(costs))
        for block in self._blocks:
            counts[block.options] += block.taken(costs, parts)
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


class _Block:
    """Jobs that may take the same options, and these alone: what nobody may take need not be reckoned with."""

    __slots__ = ("_per_unit", "_places", "_rates", "_sheet", "_weights", "jobs", "options")

    def __init__(self, jobs: Places, options: Places | slice, rates: Floats, per_unit: Floats, weights: Floats) -> None:
        self.jobs = jobs
        self.options = options
        self._rates = np.ascontiguousarray(rates[jobs][:, options])
        self._per_unit = np.ascontiguousarray(per_unit[jobs][:, options])
        self._weights = weights[jobs][:, None]
        self._sheet = np.empty_like(self._rates)  # to reckon on: memory that is fetched anew costs more than the sums
        self._places = np.arange(len(jobs))

    def worths(self, costs: Floats, parts: Floats) -> Floats:
        """λ of each of its jobs; `costs` of all options, `parts` of all jobs."""
        paid = np.multiply(parts[self.jobs][:, None], costs[self.options], out=self._sheet)
        paid += self._weights
        paid *= self._per_unit
        return np.asarray(paid.min(axis=1))

    def taken(self, costs: Floats, parts: Floats) -> Floats:
        """[option]: how many of its jobs would take it."""
        worths = self.worths(costs, parts)[:, None]
        surplus = np.multiply(worths, self._rates, out=self._sheet)
        surplus -= costs[self.options]
        best = surplus.argmax(axis=1)
        wanted = surplus[self._places, best] > 0.0
        return np.bincount(best[wanted], minlength=surplus.shape[1]).astype(np.float64)


def _blocks(rates: Floats, per_unit: Floats, weights: Floats) -> list[_Block]:
    """Jobs by the options they may take; all in one where the market is small."""
    everything = slice(None)
    if rates.size <= _SMALL or not (weights > 0.0).all():  # what cannot be had must be dear, and costs times the weight
        return [_Block(np.arange(len(rates)), everything, rates, per_unit, weights)]
    able = rates > 0.0
    packed = np.packbits(able, axis=1)
    _, first, of = np.unique(packed.view(f"V{packed.shape[1]}"), return_index=True, return_inverse=True)
    found = []
    for number, example in enumerate(first.tolist()):
        options = np.flatnonzero(able[example])
        jobs = np.flatnonzero(of.reshape(-1) == number)
        found.append(_Block(jobs, options if len(options) else everything, rates, per_unit, weights))
    return found


def ends(bills: Floats, weights: Floats, replaced: Floats | float = 0.0) -> Floats:
    """ρ: the part of all weight that is there when each job ends, if jobs end in the order of their bills.

    `replaced` [job] is the part of those who have left by then whose place newcomers have taken.
    """
    order = np.argsort(-bills, kind="stable")
    longer = np.empty(len(bills))
    longer[order] = np.cumsum(weights[order]) - weights[order]
    shorter = weights.sum() - longer - weights
    return np.asarray((longer + replaced * shorter) / weights.sum())
