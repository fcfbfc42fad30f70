"""The batch sizes that the jobs of one device may have, what is believed of them, and which to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import log
from typing import Protocol, runtime_checkable

import numpy as np

from carpool.core.estimates import Estimate, Estimator
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.policies.goodput import CountsSteps, own_batch, worth_of_step
from carpool.policies.share_search import Setting, Vector
from carpool.policies.share_trials import Trial
from carpool.policies.tuner import Tuner, batch_grid
from carpool.policies.uses import memory_of

_SIZES = {1: 25, 2: 13, 3: 9, 4: 7}  # of a job's grid, by the number of jobs tuned together
_MARGIN = 1.1  # on what the memory model says
_HOPE = 0.5  # of the spread of a rate: what may be better is tried
_APART = 1.5  # times larger or smaller: what is nearer is no other batch
_GUESS = 0.25  # of a rate, from which on its spread is that of a guess


@runtime_checkable
class KnowsBatches(Protocol):
    """An estimator that can tell how far a batch size brings a training, and what memory it takes."""

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        """Progress alone over that at the job's own batch: (m/T(m)) / (m0/T(m0)) · (φ + m0)/(φ + m)."""
        ...

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        """Bytes on each of its devices."""
        ...


def is_tunable(estimates: Estimator, job: Job) -> bool:
    """Whether the batch size may change on one device, and there is a belief of what that does to learning."""
    return job.spec.devices == 1 and _may_change(estimates, job.spec)


def best_alone(estimates: Estimator, job: Job, kind: Kind, capacity: int) -> int:
    """Where tuning starts: the batch with the highest believed goodput that fits into memory; 0: the job's own."""
    if not is_tunable(estimates, job) or not isinstance(estimates, KnowsBatches):
        return 0
    sizes = _sizes(estimates, job, _SIZES[4], capacity)
    return max(sizes, key=lambda size: estimates.goodput(job.spec, kind, size).mean)


def best_step(estimates: Estimator, job: Job, place: Placement, capacity: int, *, growth: int, trust: float) -> int:
    """The batch with which a job is believed to get on best in a place, from an estimator that counts steps.

        g(m) = (rate(m) ± h·its spread) · m/m0 · (φ + m0)/(φ + m)

    Each batch is at most `growth` times the one before, up or down, and the one a job has stays until another is
    believed to be `trust` times better. The spread counts in favour of what is only guessed, so that it is tried where
    it may be much better, and against what was measured: rates that jump about let nobody go back and forth.
    """
    spec, own = job.spec, own_batch(estimates, job.spec)
    has = own if job.desired is None else job.desired.batch_size or own

    def speed(size: int, hope: float) -> float:
        mean, spread = estimates.rate(spec, replace(place, batch_size=size))
        if spread < _GUESS * mean:
            hope = -hope
        return (mean + hope * spread) * worth_of_step(estimates, spec, size)

    sizes = _sizes(estimates, job, _SIZES[2], capacity)
    near = [m for m in sizes if _APART <= max(m / has, has / m) <= growth]
    best = max(near, key=lambda size: (speed(size, _HOPE), -size), default=has)
    return best if speed(best, _HOPE) > trust * speed(has, 0.0) else has


def tunes_by_steps(estimates: Estimator, job: Job) -> bool:
    """Whether a job's batch can be tuned from what its steps show (`best_step`)."""
    return isinstance(estimates, CountsSteps) and _may_change(estimates, job.spec)


class BatchTuning:
    """The mix of one device: PD_i = IF·DT/EFF of each, and Σ w·PD / Σ w as the objective."""

    def __init__(self, estimates: Estimator, kind: Kind, jobs: Sequence[Job], fraction: float, capacity: int) -> None:
        self._estimates = estimates
        self._kind = kind
        self._jobs = jobs
        weights = np.array([job.spec.weight for job in jobs])
        self._weights = weights / weights.sum() if weights.sum() > 0.0 else np.full(len(jobs), 1.0 / len(jobs))
        most = _SIZES.get(max(1, sum(is_tunable(estimates, job) for job in jobs)), 3)
        axes = [_sizes(estimates, job, most, capacity) if is_tunable(estimates, job) else [0] for job in jobs]
        own = tuple(
            own_batch(estimates, job.spec) if len(axis) > 1 else 0 for job, axis in zip(jobs, axes, strict=True)
        )
        self._rows = self._fitting(axes, capacity) or [own]
        self._places = {row: place for place, row in enumerate(self._rows)}
        self._fractions = [job.lane[0] if job.lane else fraction for job in jobs]

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self._rows) > 1

    def degradation(self, vector: Vector) -> float:
        """The logarithm of the weighted mean PD, from the rates that the jobs have reported under this vector."""
        found = [pd for pd, _ in self._measured(vector)]
        return log(float(self._weights @ found))

    def interference(self, vector: Vector) -> dict[JobId, float]:
        """IF of each job, as reported under this vector."""
        return {job.id: slower for job, (_, slower) in zip(self._jobs, self._measured(vector), strict=True)}

    def propose(self, trial: Trial | None, most: int) -> Vector | None:
        """The vector to measure next; None where the best is known well enough."""
        tried = self._tried(trial)
        row = self._tuner(trial, most).propose(tried)
        return None if row is None else self._vector(row)

    def best(self, trial: Trial) -> Vector:
        """The best of those measured."""
        return self._vector(self._tuner(trial, 1).best(self._tried(trial)))

    def _measured(self, vector: Vector) -> list[tuple[float, float]]:
        """(PD, IF) of each job: IF = rate believed alone over rate reported, PD = IF over the batch's goodput."""
        found = []
        for job, setting in zip(self._jobs, vector, strict=True):
            alone = Placement(((self._kind, 1),), batch_size=setting.batch_size)
            slower = self._estimates.rate(job.spec, alone).mean / max(job.rate, 1e-9)
            found.append((slower / self._goodput(job, setting.batch_size), slower))
        return found

    def _goodput(self, job: Job, batch_size: int) -> float:
        if not batch_size or not isinstance(self._estimates, KnowsBatches):
            return 1.0
        return max(self._estimates.goodput(job.spec, self._kind, batch_size).mean, 1e-9)

    def _tuner(self, trial: Trial | None, most: int) -> Tuner:
        """Believed: every batch as alone, times the interference that was measured at first."""
        slower: Mapping[JobId, float] = trial.corrections if trial is not None else {}
        columns = []
        for place, job in enumerate(self._jobs):
            sizes = sorted({row[place] for row in self._rows})
            pd = {size: slower.get(job.id, 1.0) / self._goodput(job, size) for size in sizes}
            columns.append([pd[row[place]] for row in self._rows])
        believed = np.log(self._weights @ np.array(columns))
        grid = np.log(np.maximum(np.array(self._rows, dtype=np.float64), 1.0))
        return Tuner(grid, believed, most=most)

    def _tried(self, trial: Trial | None) -> list[tuple[int, float]]:
        known = trial.tried if trial is not None else ()
        return [(self._places[_row(v)], -value) for v, value, _ in known if _row(v) in self._places]

    def _vector(self, row: int) -> Vector:
        return tuple(map(Setting, self._fractions, self._rows[row]))

    def _fitting(self, axes: Sequence[Sequence[int]], capacity: int) -> list[tuple[int, ...]]:
        """Rows whose memory fits together."""
        rows = list(product(*axes))
        if not capacity:
            return rows
        needs = [
            [_memory(self._estimates, job.spec, size) for size in axis]
            for job, axis in zip(self._jobs, axes, strict=True)
        ]
        return [row for row, need in zip(rows, product(*needs), strict=True) if sum(need) * _MARGIN <= capacity]


def _row(vector: Vector) -> tuple[int, ...]:
    return tuple(setting.batch_size for setting in vector)


def _memory(estimates: Estimator, spec: JobSpec, batch_size: int) -> int:
    if batch_size and isinstance(estimates, KnowsBatches):
        return estimates.memory(spec, batch_size)
    return memory_of(estimates, spec)


def _may_change(estimates: Estimator, spec: JobSpec) -> bool:
    may = spec.batch_range is not None and not spec.exact and isinstance(estimates, KnowsBatches)
    return may and own_batch(estimates, spec) > 0


def _sizes(estimates: Estimator, job: Job, most: int, capacity: int) -> list[int]:
    """The grid of one job: its range, as far as memory allows."""
    spec, own = job.spec, own_batch(estimates, job.spec)
    assert spec.batch_range is not None
    sizes = batch_grid(*spec.batch_range, own, most)
    fitting = [size for size in sizes if not capacity or _memory(estimates, spec, size) * _MARGIN <= capacity]
    return fitting or [own]
