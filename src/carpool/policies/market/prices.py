"""Market-clearing prices per device type, and relative prices that account for jobs waiting for a better type.

A price μ_k is in weighted seconds of completion time per second of a device of type k. An option o takes c_o devices
(of each type) and gives job j the rate g_j(o). Two rules follow from each other:

    worth of a unit of work    λ_j = min over o of (w_j + ρ_j · μ·c_o) / g_j(o)
    what job j prefers         the o with the largest λ_j · g_j(o) − μ·c_o, if that is above 0

One unit of work less ends j sooner by 1/g_j(o): that saves w_j for j itself, and c_o devices for the jobs still there
when j ends, at the price of that time, ρ_j · μ. Clearing prices are the lowest at which jobs prefer no more devices
than there are. Devices that no job would wait for cost nothing.

Prices fall with the weight of the competing jobs, so ρ_j is the part of all weight that remains when j ends (`ends`).
For gangs of one size that gives shortest remaining time over weight first; for a batch of jobs with rates k^p it comes
within about one per cent of heSRPT, the optimum (Berg, Vesilo, Harchol-Balter 2020). Where jobs keep arriving, part of
the completed ones is replaced, and prices fall less.
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
_CLOSER, _ROUGHLY = (3.0, 2.0, 1.2), (1.6,)  # error factors of successive rounds, in small and large markets
_LITTLE = (1.2,)  # error factor of a known direction of prices
_FINE = 12  # bisections along a direction
_LARGE = 50_000  # jobs × options
_SMALL = 5_000  # jobs × options, below which one block is faster
_ABOVE = 1.0 + 1e-9  # a price at which the job at the margin prefers nothing, despite rounding
_NEVER = 1e-30  # least rate
_DIGITS = 9  # significant digits of a figure's logarithm that distinguish jobs


class _Rigid(NamedTuple):
    """Jobs without a choice of sizes."""

    able: Places  # those that can run
    counts: Floats  # the devices that each of these needs


@dataclass(frozen=True, slots=True)
class Market:
    """Jobs in rows, options in columns, device types in the columns of `needs`."""

    rates: Floats  # [job, option] believed units of work per second; 0: not possible
    needs: Floats  # [option, kind] devices that an option takes
    supply: Floats  # [kind] existing devices
    weights: Floats  # [job]
    work: Floats  # [job] units of work left
    per_unit: Floats = field(init=False, repr=False)  # [job, option] seconds for a unit of work
    _blocks: list[_Block] = field(init=False, repr=False)
    _seconds: list[Floats] = field(init=False, repr=False, default_factory=list)  # of `seconds`, once it was asked for
    _rigid: list[_Rigid | None] = field(init=False, repr=False, default_factory=list)  # likewise of `_as_rigid`

    def __post_init__(self) -> None:
        """Invert the rates and group jobs by possible options once, since every price tried needs both."""
        object.__setattr__(self, "per_unit", 1.0 / np.maximum(self.rates, _NEVER))
        object.__setattr__(self, "_blocks", _blocks(self.rates, self.per_unit, self.weights))

    @property
    def is_large(self) -> bool:
        """Whether prices are found only roughly, to save time."""
        return self.rates.size > _LARGE

    def worths(self, prices: Floats, parts: Floats) -> Floats:
        """λ: the value of a unit of each job's work, if devices keep `parts` of their price when it ends."""
        found = np.empty(len(self.work))
        costs = self.needs @ prices
        for block in self._blocks:
            found[block.jobs] = block.worths(costs, parts)
        return found

    def seconds(self) -> Floats:
        """[job, option]: time to completion; not to be changed."""
        if not self._seconds:
            self._seconds.append(np.asarray(self.work[:, None] * self.per_unit))
        return self._seconds[0]

    def bills(self, prices: Floats) -> Floats:
        """[job]: total cost of its completion per weight, in seconds; jobs end in this order."""
        return np.asarray(self.work * self.worths(prices, np.ones(len(self.work))) / self.weights)

    def taken(self, prices: Floats, parts: Floats) -> Floats:
        """[kind]: devices preferred at these prices."""
        costs = self.needs @ prices
        counts = np.zeros(len(costs))
        for block in self._blocks:
            counts[block.options] += block.taken(costs, parts)
        return np.asarray(counts @ self.needs)

    def clear(self, parts: Floats, near: Floats | None = None, along: Floats | None = None) -> Floats:
        """The lowest prices at which no device type is preferred beyond its supply.

        Bisection in the logarithm, over the whole range or `near` known prices, first for all types at once and
        then one by one, since a price shifts demand to other types. Where the direction of prices is known
        (`along`), each type moves little: then one may be preferred beyond its supply, by jobs that rather wait
        for it.
        """
        if (rigid := self._as_rigid()) is not None:
            return self._clear_rigid(rigid, parts)
        factors, steps = (_ROUGHLY, _FEW) if self.is_large else (_CLOSER, _MANY)
        if along is not None:
            found, factors, steps = self._level(parts, along / along.max(), near), _LITTLE, _FEW
        elif near is not None:
            found = near
        else:
            most = np.full(len(self.supply), 2.0 * self.weights.sum())
            least = most * 2.0**-_OCTAVES
            if (self.taken(least, parts) <= self.supply).all():
                return least  # nothing is scarce
            found = self._bisect(parts, least, most, _COARSE)
        for factor in factors:
            for kind in range(len(self.supply)):
                around = np.where(np.arange(len(self.supply)) == kind, factor, 1.0)
                found = self._bisect(parts, found / around, found * around, steps)
        return found

    def _as_rigid(self) -> _Rigid | None:
        """The jobs of a market with one device type, if no job has a choice of sizes; None for any other market."""
        if not self._rigid:
            is_able = self.rates > 0.0
            choices = np.count_nonzero(is_able, axis=1)
            is_rigid = len(self.supply) == 1 and bool((choices <= 1).all())
            able = np.flatnonzero(choices)
            counts = self.needs[is_able[able].argmax(axis=1), 0] if is_rigid else self.supply
            self._rigid.append(_Rigid(able, counts) if is_rigid else None)
        return self._rigid[0]

    def _clear_rigid(self, rigid: _Rigid, parts: Floats) -> Floats:
        """The clearing price of a rigid market: job j prefers its c devices while μ·c·(1 − ρ_j) is below w_j."""
        able, counts = rigid
        with np.errstate(divide="ignore"):
            limits = self.weights[able] / (counts * (1.0 - parts[able]))
        order = np.argsort(-limits, kind="stable")
        beyond = np.flatnonzero(np.cumsum(counts[order]) > self.supply[0])
        least = 2.0 * self.weights.sum() * 2.0**-_OCTAVES
        return np.array([limits[order[beyond[0]]] * _ABOVE if len(beyond) else least])

    def _level(self, parts: Floats, along: Floats, near: Floats | None) -> Floats:
        """The lowest prices in one direction at which total demand is worth no more than total supply."""
        high = 2.0 * float(self.weights.sum()) if near is None else float(near.max()) * _CLOSER[0]
        low = high * 2.0**-_OCTAVES if near is None else high / _CLOSER[0] ** 2
        there = along @ self.supply
        for _ in range(_FINE):
            middle = (low * high) ** 0.5
            is_short = along @ self.taken(middle * along, parts) > there
            low, high = (middle, high) if is_short else (low, middle)
        return high * along

    def _bisect(self, parts: Floats, low: Floats, high: Floats, steps: int) -> Floats:
        is_open = low < high
        for _ in range(steps):
            middle = np.sqrt(low * high)
            is_short = (self.taken(middle, parts) > self.supply) & is_open
            low, high = np.where(is_short, middle, low), np.where(is_short, high, middle)
        return high


class _Block:
    """Jobs with the same possible options."""

    __slots__ = ("_per_unit", "_places", "_rates", "_sheet", "_weights", "jobs", "options")

    def __init__(self, jobs: Places, options: Places | slice, rates: Floats, per_unit: Floats, weights: Floats) -> None:
        self.jobs = jobs
        self.options = options
        self._rates = np.ascontiguousarray(rates[jobs][:, options])
        self._per_unit = np.ascontiguousarray(per_unit[jobs][:, options])
        self._weights = weights[jobs][:, None]
        self._sheet = np.empty_like(self._rates)  # scratch: allocation costs more than the arithmetic
        self._places = np.arange(len(jobs))

    def worths(self, costs: Floats, parts: Floats) -> Floats:
        """λ of its jobs; `costs` of all options, `parts` of all jobs."""
        paid = np.multiply(parts[self.jobs][:, None], costs[self.options], out=self._sheet)
        paid += self._weights
        paid *= self._per_unit
        return np.asarray(paid.min(axis=1))

    def taken(self, costs: Floats, parts: Floats) -> Floats:
        """[option]: how many of its jobs prefer it."""
        worths = self.worths(costs, parts)[:, None]
        surplus = np.multiply(worths, self._rates, out=self._sheet)
        surplus -= costs[self.options]
        best = surplus.argmax(axis=1)
        wanted = surplus[self._places, best] > 0.0
        return np.bincount(best[wanted], minlength=surplus.shape[1]).astype(np.float64)


def _blocks(rates: Floats, per_unit: Floats, weights: Floats) -> list[_Block]:
    """Jobs grouped by possible options; one block if the market is small."""
    everything = slice(None)
    if rates.size <= _SMALL or not (weights > 0.0).all():  # with zero weights, impossible options would seem free
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
    """ρ: the part of all weight that remains when each job ends, if jobs end in the order of their bills.

    Of equal bills the first ends first. `replaced` [job] is the part of the jobs completed by then that arrivals have
    replaced.
    """
    order = last_to_first(bills)
    longer = np.empty(len(bills))
    longer[order] = np.cumsum(weights[order]) - weights[order]
    shorter = weights.sum() - longer - weights
    return np.asarray((longer + replaced * shorter) / weights.sum())


def last_to_first(figures: Floats) -> Places:
    """Rows by descending figure, the last row first of those that are equal up to rounding."""
    with np.errstate(divide="ignore"):
        alike = np.round(np.log(figures), _DIGITS)
    return np.asarray(np.argsort(alike, kind="stable")[::-1])


_INTERVALS = 12
_MOST = 300  # rows of the relaxation
_SHORTEST_S = 0.1  # least length of a job
_FINEST = 0.25  # octaves by which merged jobs may differ


class KindPrices(NamedTuple):
    """Prices of device types relative to each other, valid for some time."""

    costs: tuple[float, ...]  # [kind]; all 0: no job would wait for any
    supply: tuple[float, ...]  # [kind], when they were computed
    jobs: int  # number of jobs then
    until: float

    @classmethod
    def of_note(cls, note: Sequence[Any] | None) -> KindPrices | None:
        if not note:
            return None
        costs, supply, jobs, until = note
        return cls(tuple(costs), tuple(supply), int(jobs), float(until))

    def as_note(self) -> list[Any]:
        return [list(self.costs), list(self.supply), self.jobs, self.until]

    def holds(self, market: Market, at: float) -> bool:
        """Whether the prices still apply to a market: same supply, within a factor of two of the jobs, not expired."""
        same = len(self.supply) == len(market.supply) and bool((market.supply == self.supply).all())
        return same and at < self.until and self.jobs < 2 * len(market.work) < 4 * self.jobs

    @property
    def along(self) -> Floats | None:
        """The direction of prices; None if all are 0. Duals may be negative by rounding."""
        return np.maximum(self.costs, 0.0) if max(self.costs) > 0.0 else None


def relative_prices(market: Market, at: float) -> KindPrices:
    """Prices from the linear relaxation behind `hare`; without an optimum, no prices until the next interval.

    The current market lets a job choose among today's devices only, so slow types attract jobs that should wait for
    a fast one. The relaxation lets every job choose among all types at all times; its dual prices π_k(0) give the
    direction, while the market gives the level, since the relaxation knows neither gangs nor diminishing returns.
    """
    nothing = (0.0,) * len(market.supply)
    demand = demand_of(market)
    if not len(demand.work):
        return KindPrices(nothing, tuple(market.supply.tolist()), len(market.work), at)
    found = solve(demand, _INTERVALS)
    costs = tuple(found.prices[:, 0].tolist()) if found.optimal else nothing
    return KindPrices(costs, tuple(market.supply.tolist()), len(market.work), at + float(found.edges[1]))


def demand_of(market: Market, most: int = _MOST) -> Demand:
    """Jobs as the relaxation sees them: device-seconds on the best type, at their fastest size there.

    Jobs that can run only on several types at once are left out. Above `most` jobs, similar ones are merged.
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
    return demand if len(able) <= most else _merged(demand, most)


def _merged(demand: Demand, most: int) -> Demand:
    """One row for similar jobs: the sum of their sizes, work and weights."""
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
    none = np.zeros(len(work))
    return Demand(speeds, total(demand.widths), work, total(demand.weights), demand.capacity, none)


def _alike(traits: Floats, apart: float) -> np.ndarray[Any, np.dtype[np.intp]]:
    """The grid cell of each row of traits."""
    return np.unique(np.round(traits / apart), axis=0, return_inverse=True)[1].reshape(-1)
