"""Lower bound on completion times in IADeep's workload: a linear program over time, jobs and mixes.

With p_j the seconds of job j alone at its best batch and cap, and r_j its arrival, a job that never goes faster than
that ends no earlier than M_j + p_j/2, M_j the mean instant of its work. So the sum of completion times is at least

    min Σ_j (Σ_t t·x_jt / p_j + p_j/2)    where    Σ_t x_jt = p_j,    0 ≤ x_jt ≤ length of interval t, none before r_j,
    Σ_{j of model i} x_jt ≤ Σ_G rate_Gi·z_Gt    and    Σ_G z_Gt ≤ devices · length of interval t

for x_jt the work of job j in interval t, counted from its beginning, and z_Gt the device-seconds of mix G. It knows all
arrivals, and moves are free. Mixes are all of up to four jobs under equal caps of `CAPS`, each at its best batch alone.
Mixes are added until none helps; what they could still help is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix

from carpool.core.model import JobSpec
from carpool.core.topology import Neighbour, Placement
from carpool.policies.iadeep.batch_tuning import batch_grid
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.colocation import ColocationWorld
from grounds.iadeep import DEVICES, KIND

Floats = NDArray[np.float64]

CAPS = (0.25, 0.4, 0.5, 0.75, 1.0)
_STEP_S = 20.0  # length of an interval
_WITHIN_S = 15_000.0  # a job ends so long after it came and 1.2 times its length
_GOOD = 1.0  # seconds of the mean that a program may still be off
_ROUNDS = 12


class Best(NamedTuple):
    """How a model is fastest alone."""

    spec: JobSpec
    batch_size: int
    rate: float


class Mixes(NamedTuple):
    """What may share a device."""

    best: dict[str, Best]
    rates: Floats  # [mix, model]: of all jobs of the model, over their best alone

    @property
    def models(self) -> list[str]:
        """In the order of the columns."""
        return list(self.best)


def mixes_of(world: ColocationWorld, specs: Sequence[JobSpec], most: int = 4) -> Mixes:
    """All mixes of up to `most` jobs."""
    best = {spec.model: _best(world, spec) for spec in sorted(specs, key=lambda spec: spec.model)}
    rows = list(np.eye(len(best)))
    for count in range(2, most + 1):
        for names in combinations_with_replacement(best, count):
            rows += [_rates(world, best, names, cap) for cap in CAPS]
    return Mixes(best, np.array(rows))


def _best(world: ColocationWorld, spec: JobSpec) -> Best:
    sizes = batch_grid(*spec.batch_range, spec.batch_size, 25) if spec.batch_range else [spec.batch_size]
    tried = [(world.pace(spec, 0.0, _alone(cap, size)).rate, size) for size in sizes for cap in CAPS]
    rate, size = max(tried)
    return Best(spec, size, rate)


def _alone(cap: float, size: int, neighbours: tuple[Neighbour, ...] = ()) -> Placement:
    return Placement(((KIND, 1),), cap, size, neighbours)


def _rates(world: ColocationWorld, best: dict[str, Best], names: Sequence[str], cap: float) -> Floats:
    found = dict.fromkeys(best, 0.0)
    for place, name in enumerate(names):
        others = [best[other] for other in (*names[:place], *names[place + 1 :])]
        beside = tuple([Neighbour(other.spec, cap, other.batch_size) for other in others])
        own = best[name]
        found[name] += world.pace(own.spec, 0.0, _alone(cap, own.batch_size, beside)).rate / own.rate
    return np.array(list(found.values()))


class _Program:
    """The rows and columns that do not depend on which mixes are allowed."""

    def __init__(self, arrivals: Sequence[Arrival], mixes: Mixes) -> None:
        self.mixes = mixes
        self.came = np.array([at for at, _ in arrivals])
        self.need = np.array([(spec.work or 0.0) / mixes.best[spec.model].rate for _, spec in arrivals])
        self.model = np.array([mixes.models.index(spec.model) for _, spec in arrivals])
        first = (self.came // _STEP_S).astype(int)
        last = ((self.came + 1.2 * self.need + _WITHIN_S) // _STEP_S).astype(int)
        spans = [np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]
        self.job = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        self.slots, self.slot = np.unique(np.concatenate(spans), return_inverse=True)
        begins = self.slots[self.slot] * _STEP_S
        self.costs = np.maximum(begins, self.came[self.job]) / self.need[self.job]
        self.most = np.minimum(_STEP_S, begins + _STEP_S - self.came[self.job])

    def solve(self, allowed: Sequence[int]) -> tuple[float, Floats, Floats]:
        """The mean completion time, and what work of each model and a device are worth [slot, …]."""
        num_x, num_slots, num_models = len(self.job), len(self.slots), len(self.mixes.models)
        num_z = len(allowed) * num_slots
        whole = csr_matrix((np.ones(num_x), (self.job, np.arange(num_x))), shape=(len(self.need), num_x + num_z))
        rows, columns, numbers = [self.model[self.job] * num_slots + self.slot], [np.arange(num_x)], [np.ones(num_x)]
        slots = np.arange(num_slots)
        for place, mix in enumerate(allowed):
            there = num_x + place * num_slots + slots
            for model in np.flatnonzero(self.mixes.rates[mix]):
                rows.append(model * num_slots + slots)
                columns.append(there)
                numbers.append(np.full(num_slots, -self.mixes.rates[mix, model]))
            rows.append(num_models * num_slots + slots)
            columns.append(there)
            numbers.append(np.ones(num_slots))
        shape = ((num_models + 1) * num_slots, num_x + num_z)
        limits = coo_matrix((np.concatenate(numbers), (np.concatenate(rows), np.concatenate(columns))), shape=shape)
        room = np.concatenate([np.zeros(num_models * num_slots), np.full(num_slots, DEVICES * _STEP_S)])
        high = np.concatenate([self.most, np.full(num_z, np.inf)])
        found = linprog(
            np.concatenate([self.costs, np.zeros(num_z)]),
            A_ub=limits.tocsr(),
            b_ub=room,
            A_eq=whole,
            b_eq=self.need,
            bounds=np.column_stack([np.zeros(len(high)), high]),
            method="highs",
        )
        assert found.status == 0, found.message
        worth = -found.ineqlin.marginals.reshape(num_models + 1, num_slots).T
        mean = float((found.fun + self.need.sum() / 2.0) / len(self.need) - self.came.mean())
        return mean, worth[:, :-1], worth[:, -1]


def lower_bound(arrivals: Sequence[Arrival], mixes: Mixes) -> float:
    """Seconds that the mean completion time of a stream cannot be below."""
    program = _Program(arrivals, mixes)
    draws = np.random.default_rng(0).dirichlet(np.full(len(mixes.models), 0.5), 60)
    allowed = list(dict.fromkeys([*range(len(mixes.models)), *(mixes.rates @ draws.T).argmax(axis=0).tolist()]))
    bound = 0.0
    for _ in range(_ROUNDS):
        mean, worths, prices = program.solve(allowed)
        short = mixes.rates @ worths.T - prices
        missed = np.maximum(0.0, short.max(axis=0))
        bound = max(bound, mean - float(missed.sum()) * DEVICES * _STEP_S / len(arrivals))
        new = set(short.argmax(axis=0)[missed > 0.0].tolist()) - set(allowed)
        if mean - bound < _GOOD or not new:
            break
        allowed += sorted(new)
    return max(bound, float(program.need.mean()))
