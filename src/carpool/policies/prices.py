"""Market-clearing prices: what a device-second of each kind is worth, and what each job would take at that price.

A price μ_k is counted in weighted job-seconds of delay per second of a device of kind k. An option o takes c_o devices
(of each kind) and lets job j get on at g_j(o). Two rules follow from each other:

    worth of a unit of work    λ_j = min over o of (w_j + ρ_j · μ·c_o) / g_j(o)
    what job j would take      the o with the largest λ_j · g_j(o) − μ·c_o, if that is above 0

A unit of j's work less lets j end sooner by 1/g_j(o): that saves w_j itself, and hands c_o devices to those who are
still there when j ends, at the price of that time, ρ_j · μ. Prices clear the market: they are the lowest at which jobs
take no more than there is. Devices that nobody would wait for cost nothing.

How the price falls: it is carried by the weight of those who compete, so ρ_j is the part of all weight that is left
when j ends. For a batch with rates k^p, and for gangs of one width, that is exact: the shares are those of heSRPT
(Berg, Vesilo, Harchol-Balter 2020) and of shortest remaining time first. See `ends`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BISECTIONS = 24  # of a factor of 2^24 between the least and the highest price that could clear a market
_SWEEPS = 3  # over kinds whose prices depend on each other
_NEVER = 1e-30  # a rate so low that it is none


@dataclass(frozen=True, slots=True)
class Market:
    """Jobs in rows, options in columns, kinds of devices in the columns of `needs`."""

    rates: Floats  # [job, option] believed units of work per second; 0: not possible
    needs: Floats  # [option, kind] devices that an option takes
    supply: Floats  # [kind] devices there are
    weights: Floats  # [job]
    work: Floats  # [job] units of work left

    def worths(self, prices: Floats, parts: Floats) -> Floats:
        """λ: what a unit of each job's work is worth, if its devices are worth `parts` of the prices when it ends."""
        return np.asarray(self._dearest(self.needs @ prices, parts).min(axis=1))

    def seconds(self) -> Floats:
        """[job, option]: time to the end."""
        return self.work[:, None] / np.maximum(self.rates, _NEVER)

    def bills(self, prices: Floats) -> Floats:
        """What a job's completion costs all together per its own weight, in seconds: its place in the order of ends."""
        return np.asarray(self.work * self.worths(prices, np.ones(len(self.work))) / self.weights)

    def taken(self, prices: Floats, parts: Floats) -> Floats:
        """[kind]: devices that jobs would take at these prices."""
        costs = self.needs @ prices
        surplus = self._dearest(costs, parts).min(axis=1)[:, None] * self.rates - costs
        best = surplus.argmax(axis=1)
        wanted = surplus[np.arange(len(best)), best] > 0.0
        return np.asarray(self.needs[best[wanted]].sum(axis=0))

    def _dearest(self, costs: Floats, parts: Floats) -> Floats:
        """[job, option]: (w + ρ · cost) / g."""
        return np.asarray((self.weights[:, None] + parts[:, None] * costs) / np.maximum(self.rates, _NEVER))


def ends(bills: Floats, weights: Floats) -> Floats:
    """ρ: the part of all weight that is still there when each job ends, if jobs end in the order of their bills."""
    order = np.argsort(-bills, kind="stable")
    longer = np.empty(len(bills))
    longer[order] = np.cumsum(weights[order]) - weights[order]
    return longer / weights.sum()


def clear(market: Market, parts: Floats) -> Floats:
    """The lowest prices at which no kind is wanted by more jobs than it can serve."""
    num_kinds = len(market.supply)
    prices = np.zeros(num_kinds)
    most = market.weights.sum() * 2.0
    for sweep in range(_SWEEPS if num_kinds > 1 else 1):
        before = prices.copy()
        for kind in range(num_kinds):
            prices[kind] = 0.0
            if market.taken(prices, parts)[kind] > market.supply[kind]:
                low, high = most * 2.0**-_BISECTIONS, most
                for _ in range(_BISECTIONS):
                    prices[kind] = (low * high) ** 0.5
                    if market.taken(prices, parts)[kind] > market.supply[kind]:
                        low = prices[kind]
                    else:
                        high = prices[kind]
                prices[kind] = high
        if sweep and np.allclose(prices, before, rtol=0.01):
            break
    return prices
