"""A small interior-point solver for linear programs that stops where it is: inside the optimal face, not at a corner.

Where a program has many optima, a simplex solver returns a corner with as many exact zeros as possible; an
interior-point method without crossover returns a point near the centre of all optima, with tiny positive values where
others have zeros, the smaller the worse they would be. Programs that only ask for some feasible point depend on that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import bmat, csc_array, diags_array
from scipy.sparse.linalg import splu

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-8
_MAX_STEPS = 80
_TO_BORDER = 0.98  # part of the way to the border that one step may go
_NO_MOVE = 1e-10  # a step shorter than this no longer changes anything


def interior_point(cost: Array, rows: Any, limits: Array) -> Array:
    """Minimise cost·x subject to rows·x ≤ limits; `rows` is a sparse matrix of full column rank.

    Mehrotra's predictor–corrector (SIAM J. Optimization 2, 1992) on rows·x + s = limits, s ≥ 0, with duals z ≥ 0.
    Every step solves [0 Gᵀ; G −s/z] [dx; dz] = r by a sparse LU, so that a program with thousands of rows stays cheap.
    """
    rows = csc_array(rows)
    num_rows = len(limits)
    x, slack, dual = _start(cost, rows, limits)
    limit_norm, cost_norm = max(1.0, float(np.linalg.norm(limits))), max(1.0, float(np.linalg.norm(cost)))
    for _ in range(_MAX_STEPS):
        primal = rows @ x + slack - limits
        reduced = rows.T @ dual + cost
        gap = float(slack @ dual)
        is_feasible = max(np.linalg.norm(primal) / limit_norm, np.linalg.norm(reduced) / cost_norm) < _TOLERANCE
        if is_feasible and min(gap, gap / max(abs(float(cost @ x)), 1e-12)) < _TOLERANCE:
            break
        solve = _factor(rows, slack / dual)
        if solve is None:
            break
        _, ds, dz = _newton(solve, slack, dual, primal, reduced, -slack * dual)
        reach = min(_reach(slack, ds), _reach(dual, dz))
        centring = (float((slack + reach * ds) @ (dual + reach * dz)) / gap) ** 3
        aim = -slack * dual - ds * dz + centring * gap / num_rows
        dx, ds, dz = _newton(solve, slack, dual, primal, reduced, aim)
        length = _TO_BORDER * min(_reach(slack, ds), _reach(dual, dz))
        if not length > _NO_MOVE or not np.isfinite(dx).all():
            break
        x, slack, dual = x + length * dx, slack + length * ds, dual + length * dz
    return x


def _newton(
    solve: Any, slack: Array, dual: Array, primal: Array, reduced: Array, aim: Array
) -> tuple[Array, Array, Array]:
    """Moves of x, slack and dual that cancel both residuals and change slack·dual by `aim`, to first order."""
    both = solve(np.concatenate([-reduced, -primal - aim / dual]))
    dx, dz = np.split(both, [len(reduced)])
    return dx, (aim - slack * dz) / dual, dz


def _start(cost: Array, rows: Any, limits: Array) -> tuple[Array, Array, Array]:
    """Least-squares primal and dual points, moved to where slacks and duals are positive."""
    num_rows, num_columns = rows.shape
    solve = _factor(rows, np.ones(num_rows))
    assert solve is not None, "the constraint rows have full column rank"
    x = solve(np.concatenate([np.zeros(num_columns), limits]))[:num_columns]
    slack = limits - rows @ x
    dual = solve(np.concatenate([-cost, np.zeros(num_rows)]))[num_columns:]
    return x, _lifted(slack), _lifted(dual)


def _lifted(values: Array) -> Array:
    lowest = float(values.min())
    return values + 1.0 + max(0.0, -lowest) if lowest < 1e-6 else values


def _factor(rows: Any, ratio: Array) -> Any:
    """A function that solves [0 Gᵀ; G −ratio] v = r; None when the matrix is numerically singular."""
    try:
        return splu(csc_array(bmat([[None, rows.T], [rows, diags_array(-ratio)]]))).solve
    except RuntimeError:
        return None


def _reach(values: Array, change: Array) -> float:
    """How far along `change`, at most 1, the values stay positive."""
    falling = change < 0.0
    return min(1.0, float((-values[falling] / change[falling]).min())) if falling.any() else 1.0
