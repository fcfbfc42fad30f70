"""Sharing devices among a batch so that the last of its jobs ends soonest, by a linear program over deals.

A deal c gives job j c_j devices; it is used for t_c seconds, in whatever order:

    min Σ_c t_c   subject to   Σ_c t_c · s_j(c_j) ≥ R_j for every job j, t ≥ 0.

There are too many deals to list, so they are found as they are needed: with v_j the price of the j-th condition, a
deal is worth using if Σ_j v_j · s_j(c_j) > 1, and the best of them is a knapsack (Gilmore and Gomory 1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from carpool.policies.inheritance import Array, Sharing, best_deal

_ROUNDS = 50
_ENOUGH = 1.0 + 1e-6


def clearing_shares(speeds: Sequence[Array], work: Sequence[float], num_devices: int) -> Sharing:
    """The deal to begin with, and the prices: of those that are in use, the one that does most for the shortest.

    ``speeds[j][k]`` is job j's rate on k devices, k = 0 … num_devices; jobs in any order, each able to run.
    """
    needed = np.maximum(np.array(work, float), max(1e-9, 1e-6 * max(work)))  # nobody is quite done, or it would be over
    deals = [
        [int(table.argmax()) if other == job else 0 for other in range(len(speeds))] for job, table in enumerate(speeds)
    ]
    solved = _solve(speeds, needed, deals)
    for _ in range(_ROUNDS):
        found = best_deal(speeds, solved.worth, num_devices)
        if Sharing(found, solved.worth).value(speeds, found) <= _ENOUGH or found in deals:
            break
        deals.append(found)
        solved = _solve(speeds, needed, deals)
    used = np.flatnonzero(solved.seconds >= 1e-6 * solved.seconds.sum())
    first = max(used, key=lambda place: float(solved.portions[:, place].max()))
    return Sharing(deals[first], solved.worth)


class _Solved(NamedTuple):
    seconds: Array  # of each deal
    portions: Array  # [job, deal]: the part of the job done in a second
    worth: list[float]


def _solve(speeds: Sequence[Array], needed: Array, deals: Sequence[Sequence[int]]) -> _Solved:
    """The program over the deals known so far, with every condition divided by R_j: all are alike in size."""
    rates = np.array([[table[k] for table, k in zip(speeds, each, strict=True)] for each in deals]).T
    portions = rates / needed[:, None]
    solved = linprog(np.ones(len(deals)), A_ub=-portions, b_ub=-np.ones(len(needed)), method="highs")
    assert solved.x is not None, solved.message
    worth = -np.asarray(solved.ineqlin.marginals) / needed
    return _Solved(np.asarray(solved.x), portions, worth.tolist())
