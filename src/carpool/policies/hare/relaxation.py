"""Hare's linear relaxation: device-seconds per job, device type and interval, and a bound on Σ w·JCT.

Let job n have remaining work V_n, weight w_n and at most d_n devices at once, each of kind k doing s_nk of its work a
second, and let y_nk(t) devices of kind k serve it at time t. Any schedule, with whatever preemption and sharing, obeys

    Σ_n y_nk(t) ≤ N_k,    Σ_k y_nk(t) ≤ d_n,    ∫ Σ_k s_nk·y_nk(t) dt = V_n

and completes job n no earlier than M_n + p_n/2, M_n = ∫ t·Σ_k s_nk·y_nk(t)/V_n dt being the mean time of its work and
p_n its shortest possible duration: work done at no more than V_n/p_n a second has its mean at least p_n/2 before its
end (the mean busy time of Goemans et al., 2002). Cut into intervals, min Σ w_n·M_n is a linear program (HiGHS).

Its dual gives the values u_n of a unit of job n's work and the prices π_k(t) of a second of a device of type k. Any
prices give a Lagrangian lower bound (`lower_bound`), independent of the intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST = 1 / 8  # first interval over the mean one: the near future is resolved more finely
_SPAN = 1.3  # length of all intervals over the time that average devices would take
_STRETCH = 8.0  # factor on that length where it was not enough
_BOUND_CELLS = 40  # of the bound's time axis, for each interval
_BOUND_STEPS = 40  # in the search for each job's worth


@dataclass(frozen=True, slots=True)
class Demand:
    """Jobs (rows) and device types (columns) of the relaxation."""

    speeds: Floats  # s: units of work per device-second, by job and kind; 0: it cannot run there
    widths: Floats  # d: most devices at once
    work: Floats  # V: units of work left
    weights: Floats
    capacity: Floats  # N: devices of each kind
    released: Floats  # seconds from now until the job may start

    @property
    def shortest_s(self) -> Floats:
        return np.asarray(self.work / (self.widths * self.speeds.max(axis=1)), dtype=np.float64)


class Solution(NamedTuple):
    """Job values, device prices, and the mean time of each job's work."""

    edges: Floats  # of the intervals, seconds from now
    worth: Floats  # u: of a unit of each job's work
    prices: Floats  # π: of a device-second, by kind and interval
    mean_s: Floats  # M
    optimal: bool


def intervals(demand: Demand, count: int, stretch: float = 1.0) -> Floats:
    """Edges of geometrically growing intervals that should hold all work."""
    from scipy.optimize import brentq  # takes a second to import, and other policies import this module too

    speeds = demand.speeds
    typical = np.where(speeds > 0.0, speeds, 0.0).mean(axis=1)
    queue_s = float((demand.work / typical).sum() / demand.capacity.sum())
    span_s = float(demand.released.max()) + _SPAN * stretch * (queue_s + float(demand.shortest_s.max()))
    first = span_s / count * _FIRST
    ratio = brentq(lambda q: first * (q**count - 1.0) / (q - 1.0) - span_s, 1.0 + 1e-9, 8.0)
    return np.concatenate([[0.0], np.cumsum(first * ratio ** np.arange(count))])


def solve(demand: Demand, num_intervals: int) -> Solution:
    """Solve the program; `optimal` is False if HiGHS found no optimum, and then nothing else is valid."""
    found = _solve(demand, intervals(demand, num_intervals))
    return found if found.optimal else _solve(demand, intervals(demand, num_intervals, _STRETCH))


def _solve(demand: Demand, edges: Floats) -> Solution:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    num_intervals = len(edges) - 1
    num_jobs, num_kinds = demand.speeds.shape
    begins = np.maximum(edges[:-1], demand.released[:, None])
    ends = np.maximum(edges[1:], demand.released[:, None])
    middles = (begins + ends) / 2.0
    density = demand.weights / demand.work
    cost = density[:, None, None] * demand.speeds[:, :, None] * middles[:, None, :]
    jobs, kinds, spans = np.nonzero(np.broadcast_to((demand.speeds > 0.0)[:, :, None], cost.shape))
    columns = np.arange(len(jobs))
    of_kind = kinds * num_intervals + spans
    of_job = num_kinds * num_intervals + jobs * num_intervals + spans
    most = csr_array(
        (np.ones(2 * len(jobs)), (np.concatenate([of_kind, of_job]), np.concatenate([columns, columns]))),
        shape=((num_kinds + num_jobs) * num_intervals, len(jobs)),
    )
    limits = np.concatenate(
        [(demand.capacity[:, None] * np.diff(edges)).ravel(), (demand.widths[:, None] * (ends - begins)).ravel()]
    )
    whole = csr_array((demand.speeds[jobs, kinds], (jobs, columns)), shape=(num_jobs, len(jobs)))
    found = linprog(  # type: ignore[call-overload]  # the stubs know no sparse arrays
        cost[jobs, kinds, spans], most, limits, whole, demand.work, method="highs"
    )
    if found.status != 0:
        none = np.zeros(num_jobs)
        return Solution(edges, none, np.zeros((num_kinds, num_intervals)), none, optimal=False)
    done = demand.speeds[jobs, kinds] * found.x / demand.work[jobs]
    mean_s = np.bincount(jobs, done * middles[jobs, spans], num_jobs).astype(np.float64)
    prices = -found.ineqlin.marginals[: num_kinds * num_intervals].reshape(num_kinds, num_intervals)
    return Solution(edges, np.asarray(found.eqlin.marginals), prices, mean_s, optimal=True)


def worth_at(demand: Demand, edges: Floats, prices: Floats, elapsed_s: float) -> Floats:
    """Value of a unit of each job's work if it buys all of its work at given prices from now on.

    It buys in the cheapest intervals; the most expensive of those is its value.
    """
    shifted = np.maximum(edges, elapsed_s)
    lengths = np.diff(shifted)
    lengths[-1] = np.inf
    middles = (shifted[1:] + shifted[:-1]) / 2.0 - elapsed_s
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = (demand.weights / demand.work)[:, None, None] * middles + prices / demand.speeds[:, :, None]
    unit = np.where(demand.speeds[:, :, None] > 0.0, unit, np.inf)
    kind = unit.argmin(axis=1)
    cheapest = np.take_along_axis(unit, kind[:, None, :], axis=1)[:, 0, :]
    with np.errstate(invalid="ignore"):
        could = np.nan_to_num(demand.widths[:, None] * lengths * np.take_along_axis(demand.speeds, kind, axis=1))
    order = cheapest.argsort(axis=1)
    bought = np.cumsum(np.take_along_axis(could, order, axis=1), axis=1)
    last = np.minimum((bought < demand.work[:, None]).sum(axis=1), len(lengths) - 1)
    rows = np.arange(len(last))
    return np.asarray(cheapest[rows, order[rows, last]], dtype=np.float64)


def lower_bound(demand: Demand, num_intervals: int = 16) -> float:
    """A lower bound of any schedule on Σ w·(end − release), from the prices of the relaxation.

    For any prices π ≥ 0 the least of Σ w_n·M_n is at least

        Σ_n max_u { u·V_n + d_n·∫ min(0, min_k s_nk·(ρ_n·t + π_k(t)/s_nk − u)) dt } − Σ_k N_k·∫ π_k(t) dt,   ρ = w/V

    We take the prices of the program at the middles of its intervals, linear in between and 0 after the last, and
    the integrand at the cheaper end of each cell, where a piecewise linear function has its minimum.
    """
    edges, _, prices, _, optimal = solve(demand, num_intervals)
    shortest_s = demand.shortest_s
    if not optimal:
        return float((demand.weights * shortest_s).sum())
    middles = (edges[1:] + edges[:-1]) / 2.0
    inner = [np.linspace(a, b, _BOUND_CELLS, endpoint=False) for a, b in pairwise(edges)]
    cells = np.unique(np.concatenate([*inner, middles, edges[-1:]]))
    price = np.array([np.interp(cells, middles, row) for row in prices])  # by kind and cell edge
    paid = (demand.capacity[:, None] * (price[:, 1:] + price[:, :-1]) / 2.0 * np.diff(cells)).sum()
    least = sum([_least(demand, n, cells, price) for n in range(len(demand.work))])
    return float(least - paid + (demand.weights * (shortest_s / 2.0 - demand.released)).sum())


def _least(demand: Demand, n: int, cells: Floats, price: Floats) -> float:
    """The least cost of job n at given prices: a concave function of u, maximized by golden section."""
    useful = demand.speeds[n] > 0.0
    speeds = demand.speeds[n, useful, None]
    edges = np.concatenate([demand.released[n : n + 1], cells[cells > demand.released[n]]])
    there = np.array([np.interp(edges, cells, row) for row in price[useful]])
    density = demand.weights[n] / demand.work[n]
    at = density * edges + there / speeds
    unit = np.minimum(at[:, 1:], at[:, :-1])  # by kind and cell, for a unit of work
    lengths = demand.widths[n] * np.diff(edges)

    def value(u: float) -> float:
        gain = (speeds * (unit - u)).min(axis=0)
        return float(u * demand.work[n] + np.minimum(gain, 0.0) @ lengths)

    golden = (5**0.5 - 1.0) / 2.0
    low, high = 0.0, float(density * edges[-1])  # beyond, work after the last cell would pay
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(_BOUND_STEPS):
        if at_left < at_right:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = value(right)
        else:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = value(left)
    return max(at_left, at_right)
