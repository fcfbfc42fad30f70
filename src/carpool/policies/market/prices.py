"""Market-clearing prices per device type, and relative prices that account for jobs waiting for a better type.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.policies.hare.relaxation import Demand, solve

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


# A market of this instant lets a job choose among what there is now, so that slow kinds are wanted by jobs that had
# better wait for a fast one. The relaxation behind `hare` lets every job choose among all kinds at all times; its dual
# prices π_k(t) are what a device of kind k is worth then (`relaxation`). The market itself (`prices`) says how dear
# devices are altogether, since the relaxation knows neither gangs nor diminishing returns. What is taken from it is the
# direction of π(0).
#
# It is looked up again after the first of the relaxation's intervals, or when there are half or twice as many jobs. Above
# a number of jobs those that are alike in where they are fast and in weight over length are taken together.


_INTERVALS = 12
_MOST = 300  # rows of the relaxation
_SHORTEST_S = 0.1  # a job counts as at least this long
_FINEST = 0.25  # octaves by which jobs that are taken together may differ


class KindPrices(NamedTuple):
    """Prices by kind that are right against each other, for some time."""

    costs: tuple[float, ...]  # [kind]; all 0: nobody would wait for any
    supply: tuple[float, ...]  # [kind]: the devices there were
    jobs: int  # that there were
    until: float

    @classmethod
    def of_note(cls, note: Sequence[Any] | None) -> KindPrices | None:
        """As JSON has it."""
        if not note:
            return None
        costs, supply, jobs, until = note
        return cls(tuple(costs), tuple(supply), int(jobs), float(until))

    def as_note(self) -> list[Any]:
        """For JSON."""
        return [list(self.costs), list(self.supply), self.jobs, self.until]

    def holds(self, market: Market, at: float) -> bool:
        """Whether it still says something about a market."""
        same = len(self.supply) == len(market.supply) and bool((market.supply == self.supply).all())
        return same and at < self.until and self.jobs < 2 * len(market.work) < 4 * self.jobs

    @property
    def along(self) -> Floats | None:
        """The direction of prices; None where nothing is dear."""
        return np.array(self.costs) if max(self.costs) > 0.0 else None


def relative_prices(market: Market, at: float) -> KindPrices:
    """Ask the relaxation; where it has no answer, nothing is said until the next interval."""
    nothing = (0.0,) * len(market.supply)
    demand = demand_of(market)
    if not len(demand.work):
        return KindPrices(nothing, tuple(market.supply.tolist()), len(market.work), at)
    found = solve(demand, _INTERVALS)
    costs = tuple(found.prices[:, 0].tolist()) if found.optimal else nothing
    return KindPrices(costs, tuple(market.supply.tolist()), len(market.work), at + float(found.edges[1]))


def demand_of(market: Market, most: int = _MOST) -> Demand:
    """Jobs as the relaxation sees them: work in device-seconds on the best kind, at the width that is quickest there.

    Jobs that run nowhere but on several kinds at once are left out.
    """
    num_jobs, num_kinds = len(market.work), len(market.supply)
    speeds, widths = np.zeros((num_jobs, num_kinds)), np.ones(num_jobs)
    counts = market.needs.sum(axis=1)
    for kind in range(num_kinds):
        options = np.flatnonzero((market.needs[:, kind] > 0.0) & (market.needs[:, kind] == counts))
        if len(options):
            quickest = options[market.rates[:, options].argmax(axis=1)]
            rate = market.rates[np.arange(num_jobs), quickest]
            speeds[:, kind] = rate / counts[quickest]
            widths = np.maximum(widths, np.where(rate > 0.0, counts[quickest], 0.0))
    able = np.flatnonzero(speeds.max(axis=1) > 0.0)
    best = speeds[able].max(axis=1, initial=0.0)
    work = np.maximum(market.work[able] / best, _SHORTEST_S * widths[able])
    none = np.zeros(len(able))
    demand = Demand(speeds[able] / best[:, None], widths[able], work, market.weights[able], market.supply, none)
    return demand if len(able) <= most else _taken_together(demand, most)


def _taken_together(demand: Demand, most: int) -> Demand:
    """One row for jobs that are alike: as wide, as long and as heavy as all of them."""
    with np.errstate(divide="ignore"):
        traits = np.log2(np.column_stack([demand.speeds, demand.weights / demand.work]))
    traits = np.where(np.isfinite(traits), traits, -1e3)
    apart = _FINEST
    rows = _alike(traits, apart)
    while rows.max() >= most and apart < 1e4:
        apart *= 2.0
        rows = _alike(traits, apart)

    def total(column: Floats) -> Floats:
        return np.bincount(rows, column).astype(np.float64)

    work = total(demand.work)
    speeds = np.column_stack([total(demand.work * column) / work for column in demand.speeds.T])
    nobody = np.zeros(len(work))
    return Demand(speeds, total(demand.widths), work, total(demand.weights), demand.capacity, nobody)


def _alike(traits: Floats, apart: float) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The number of the cell of a grid that each row of traits lies in."""
    return np.unique(np.round(traits / apart), axis=0, return_inverse=True)[1].reshape(-1)
