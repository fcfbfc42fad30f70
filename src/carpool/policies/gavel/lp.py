"""Gavel's linear programs for time shares per device type, and the interior-point solver they use.

Where a program has many optima, a simplex solver returns a corner with as many exact zeros as possible; an
interior-point method without crossover returns a point near the centre of all optima, with tiny positive values instead
of these zeros, smaller for worse choices. Programs that only need some feasible point depend on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, linprog
from scipy.sparse import bmat, coo_array, csc_array, diags_array, eye_array, hstack, vstack
from scipy.sparse.linalg import splu

Floats = npt.NDArray[np.float64]

_TOLERANCE = 1e-8
_MAX_ITERATIONS = 80
_TO_BORDER = 0.98  # part of the way to the boundary that one step may go
_NO_MOVE = 1e-10  # a step shorter than this no longer changes anything


def interior_point(cost: Floats, rows: Any, limits: Floats) -> Floats:
    """Minimize cost·x subject to rows·x ≤ limits; `rows` is a sparse matrix of full column rank.

    Mehrotra's predictor–corrector (SIAM J. Optimization 2, 1992) on rows·x + s = limits, s ≥ 0, with duals z ≥ 0.
    Every step solves [0 Gᵀ; G −s/z] [dx; dz] = r by a sparse LU, so a program with thousands of rows stays cheap.
    """
    rows = csc_array(rows)
    num_rows = len(limits)
    system = _System(rows)
    x, slack, dual = _start(cost, rows, limits, system)
    limit_norm, cost_norm = max(1.0, float(np.linalg.norm(limits))), max(1.0, float(np.linalg.norm(cost)))
    for _ in range(_MAX_ITERATIONS):
        primal = rows @ x + slack - limits
        reduced = rows.T @ dual + cost
        gap = float(slack @ dual)
        is_feasible = max(np.linalg.norm(primal) / limit_norm, np.linalg.norm(reduced) / cost_norm) < _TOLERANCE
        if is_feasible and min(gap, gap / max(abs(float(cost @ x)), 1e-12)) < _TOLERANCE:
            break
        solve = system.factor(slack / dual)
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
    solve: Any, slack: Floats, dual: Floats, primal: Floats, reduced: Floats, aim: Floats
) -> tuple[Floats, Floats, Floats]:
    """Moves of x, slack and dual that cancel both residuals and change slack·dual by `aim`, to first order."""
    both = solve(np.concatenate([-reduced, -primal - aim / dual]))
    dx, dz = np.split(both, [len(reduced)])
    return dx, (aim - slack * dz) / dual, dz


def _start(cost: Floats, rows: Any, limits: Floats, system: _System) -> tuple[Floats, Floats, Floats]:
    """Least-squares primal and dual points, moved to where slacks and duals are positive."""
    num_rows, num_columns = rows.shape
    solve = system.factor(np.ones(num_rows))
    assert solve is not None, "the constraint rows have full column rank"
    x = solve(np.concatenate([np.zeros(num_columns), limits]))[:num_columns]
    slack = limits - rows @ x
    dual = solve(np.concatenate([-cost, np.zeros(num_rows)]))[num_columns:]
    return x, _lifted(slack), _lifted(dual)


def _lifted(values: Floats) -> Floats:
    lowest = float(values.min())
    return values + 1.0 + max(0.0, -lowest) if lowest < 1e-6 else values


class _System:
    """The matrix [0 Gᵀ; G −ratio], of which only the ratio changes from step to step."""

    def __init__(self, rows: Any) -> None:
        num_rows, num_columns = rows.shape
        self._matrix = csc_array(bmat([[None, rows.T], [rows, diags_array(-np.ones(num_rows))]]))
        self._matrix.sort_indices()
        self._diagonal = self._matrix.indptr[num_columns + 1 :] - 1  # the last entry of each of these columns

    def factor(self, ratio: Floats) -> Any:
        """A function that solves it for a right-hand side; None when the matrix is numerically singular."""
        self._matrix.data[self._diagonal] = -ratio
        try:
            return splu(self._matrix).solve
        except RuntimeError:
            return None


def _reach(values: Floats, change: Floats) -> float:
    """How far along `change`, at most 1, the values stay positive."""
    falling = change < 0.0
    return min(1.0, float((-values[falling] / change[falling]).min())) if falling.any() else 1.0


# X[j, k] is the share of its time job j spends on type k. All programs have the bounds X ≥ 0, Σ_k X[j, k] ≤ 1 and
# Σ_j width_j·X[j, k] ≤ N_k. D. Narayanan et al., Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
# Workloads, OSDI 2020, section 4.


_MAX_STEPS = 50  # of the search for the fairest ρ; four or five are usual
_SLACK = 1e-6  # relative room left to a bound found numerically, so that the program inside it is feasible


@dataclass(frozen=True, slots=True)
class Problem:
    """Jobs (rows) and device types (columns) as numbers. Each job has a positive rate somewhere."""

    rates: Floats  # work per second of the whole gang; 0 where the job cannot run
    widths: Floats  # devices of each gang
    weights: Floats
    left: Floats  # work still to do
    age_s: Floats  # since submission
    capacity: Floats  # devices of each kind

    @property
    def isolated(self) -> Floats:
        """Each job's rate on its own part of the cluster: 1/n of every type, at most all of its time."""
        shares = np.outer(1.0 / self.widths, self.capacity / len(self.widths))
        shares /= np.maximum(shares.sum(axis=1), 1.0)[:, None]
        rates: Floats = (self.rates * shares).sum(axis=1)
        return rates


def max_min(problem: Problem) -> Floats:
    """Maximize min_j (width_j / weight_j) · Σ_k T[j, k]·X[j, k] / Σ_k T[j, k]·N_k/N.

    The divisor is the job's rate when its time is spread over the types by their numbers of devices.
    """
    proportional = problem.rates @ (problem.capacity / problem.capacity.sum())
    value = problem.rates * (problem.widths / (problem.weights * proportional))[:, None]
    cost, rows, limits = _least(value, problem)
    return _shaped(interior_point(cost, rows, limits)[:-1], problem)


def throughput(problem: Problem) -> Floats:
    """Maximize Σ_j Σ_k T[j, k]·X[j, k], in units of work."""
    rows, limits = _bounds(problem)
    return _shaped(interior_point(-problem.rates.ravel(), rows, limits), problem)


def makespan(problem: Problem) -> Floats:
    """Minimize M such that Σ_k T[j, k]·X[j, k] ≥ left_j / M for every job."""
    need = np.maximum(problem.left, 1e-9)
    multiple, _ = largest_multiple(need, problem)
    return reaching(need * multiple * (1.0 - _SLACK), problem)


def finish_time_fairness(problem: Problem, alone_s: Floats) -> Floats:
    """Minimize ρ = max_j (age_j + left_j/θ_j) / alone_j with θ_j = Σ_k T[j, k]·X[j, k].

    alone_j is the job's total time on its own part of the cluster. For a given ρ each job needs θ_j ≥ left_j /
    (ρ·alone_j − age_j), and ρ is reached when the largest feasible multiple of these needs is one. The dual prices
    of that multiple bound it for every other ρ, so the next ρ is where the bound is one: a Newton step, exact after
    a few programs.
    """
    left = np.maximum(problem.left, 1e-9)
    floor = float((problem.age_s / alone_s).max())  # at or below this some job is too late already
    rho = max(2.0 * floor, 1.0)
    for _ in range(_MAX_STEPS):
        room = rho * alone_s - problem.age_s
        multiple, prices = largest_multiple(left / room, problem)
        if abs(multiple - 1.0) < _SLACK / 10.0:
            break
        better = _rho_at(multiple, prices * room, problem.age_s, alone_s)
        rho = max(better, floor + 1e-3 * (rho - floor))
    return reaching(left / (rho * (1.0 + _SLACK) * alone_s - problem.age_s), problem)


def _rho_at(multiple: float, prices: Floats, age_s: Floats, alone_s: Floats) -> float:
    """The ρ at which Σ_j prices_j / (ρ·alone_j − age_j) is `multiple`; the sum falls as ρ grows."""
    priced = prices > 0.0
    prices, age_s, alone_s = prices[priced], age_s[priced], alone_s[priced]
    floor = float((age_s / alone_s).max())

    def excess(rho: float) -> float:
        return float((prices / (rho * alone_s - age_s)).sum()) - multiple

    high = max(2.0 * floor, 1.0)
    while excess(high) > 0.0:
        high *= 2.0
    low = floor + (high - floor) / 2.0
    while excess(low) < 0.0:
        high, low = low, floor + (low - floor) / 2.0
    return float(brentq(excess, low, high))


def reaching(need: Floats, problem: Problem) -> Floats:
    """A central X among all that give every job the rate it needs."""
    rows, limits = _bounds(problem)
    rows = vstack([rows, -_per_job(problem.rates)])
    solution = interior_point(np.zeros(problem.rates.size), rows, np.concatenate([limits, -need]))
    return _shaped(solution, problem)


def largest_multiple(need: Floats, problem: Problem) -> tuple[float, Floats]:
    """The largest λ for which some X gives every job λ times the rate it needs, and the price of each need."""
    cost, rows, limits = _least(problem.rates / need[:, None], problem)
    solution = linprog(cost, A_ub=rows, b_ub=limits, bounds=(0.0, None), method="highs")
    assert solution.x is not None, f"X = 0 is feasible and X is bounded, yet: {solution.message}"
    return float(solution.x[-1]), -np.asarray(solution.ineqlin.marginals)[-len(need) :]


def _least(value: Floats, problem: Problem) -> tuple[Floats, Any, Floats]:
    """Maximize t ≤ Σ_k value[j, k]·X[j, k] for all j, with t as the last variable: cost, rows, limits."""
    bounds, limits = _bounds(problem)
    num_jobs = len(value)
    no_t, t = coo_array((len(limits), 1)), coo_array(np.ones((num_jobs, 1)))
    rows = vstack([hstack([bounds, no_t]), hstack([-_per_job(value), t])])
    cost = np.zeros(value.size + 1)
    cost[-1] = -1.0
    return cost, rows, np.concatenate([limits, np.zeros(num_jobs)])


def _bounds(problem: Problem) -> tuple[Any, Floats]:
    """The bounds of every program, on X written row by row."""
    num_jobs, num_kinds = problem.rates.shape
    column = np.arange(problem.rates.size)
    devices = coo_array((np.repeat(problem.widths, num_kinds), (column % num_kinds, column)))
    rows = vstack([-eye_array(problem.rates.size), devices, _per_job(np.ones_like(problem.rates))])
    return rows, np.concatenate([np.zeros(problem.rates.size), problem.capacity, np.ones(num_jobs)])


def _per_job(values: Floats) -> Any:
    """One row per job, with its values in its own columns."""
    num_jobs, num_kinds = values.shape
    return coo_array((values.ravel(), (np.repeat(np.arange(num_jobs), num_kinds), np.arange(values.size))))


def _shaped(solution: Floats, problem: Problem) -> Floats:
    return np.clip(solution, 0.0, 1.0).reshape(problem.rates.shape)
