"""What kinds of devices cost against each other, because jobs may also wait for a better kind.

A market of this instant lets a job choose among what there is now, so that slow kinds are wanted by jobs that had
better wait for a fast one. The relaxation behind `hare` lets every job choose among all kinds at all times; its dual
prices π_k(t) are what a device of kind k is worth then (`relaxation`). The market itself (`prices`) says how dear
devices are altogether, since the relaxation knows neither gangs nor diminishing returns. What is taken from it is the
direction of π(0).

It is looked up again after the first of the relaxation's intervals, or when there are half or twice as many jobs. Above
a number of jobs those that are alike in where they are fast and in weight over length are taken together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from carpool.policies.prices import Floats, Market
from carpool.policies.relaxation import Demand, solve

_INTERVALS = 12
_MOST = 300  # rows of the relaxation
_SHORTEST_S = 0.1  # a job counts as at least this long
_FINEST = 0.25  # octaves by which jobs that are taken together may differ


class Outlook(NamedTuple):
    """Prices by kind that are right against each other, for some time."""

    costs: tuple[float, ...]  # [kind]; all 0: nobody would wait for any
    supply: tuple[float, ...]  # [kind]: the devices there were
    jobs: int  # that there were
    until: float

    @classmethod
    def of_note(cls, note: Sequence[Any] | None) -> Outlook | None:
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


def look_ahead(market: Market, at: float) -> Outlook:
    """Ask the relaxation; where it has no answer, nothing is said until the next interval."""
    nothing = (0.0,) * len(market.supply)
    demand = demand_of(market)
    if not len(demand.work):
        return Outlook(nothing, tuple(market.supply.tolist()), len(market.work), at)
    found = solve(demand, _INTERVALS)
    costs = tuple(found.prices[:, 0].tolist()) if found.optimal else nothing
    return Outlook(costs, tuple(market.supply.tolist()), len(market.work), at + float(found.edges[1]))


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
