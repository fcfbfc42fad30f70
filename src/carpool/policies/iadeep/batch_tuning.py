"""Batch-size tuning for co-located jobs: candidate sizes and Bayesian optimization (GP-LCB) of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log, log1p, sqrt

import numpy as np

from carpool.core.estimates import Estimator
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.numerics import Floats, GaussianProcess, Matern, one_thread
from carpool.policies.estimator_queries import memory_of, worth_of_step
from carpool.policies.sharing.share_search import Setting, Vector
from carpool.policies.sharing.trial_log import Trial

Tried = Sequence[tuple[int, float]]  # (row of the grid, measured log PD)

_LENGTHS = (0.7, 1.4, 2.8)  # in natural logarithms of the batch size
_SIGNALS = (0.05, 0.1, 0.2, 0.4, 0.8)  # standard deviation of log PD about the estimate
_ENOUGH = 2  # measurements of the most promising row after which the search has converged
_USUAL = (1.4, 0.2)  # length and signal a priori


@dataclass(frozen=True, slots=True)
class Tuner:
    """Chooses rows of a grid of log batch sizes, one column per tuned job, by GP-LCB.

        next = argmin μ(x) − √β·σ(x)

    over a Gaussian process with kernel Matérn-5/2 on x = log m (Srinivas et al., 2010; Chen et al., "Interference-
    aware Multiplexing for Deep Learning in GPU Clusters", SC 2023). It models the measured log PD minus `believed`,
    so the first row is the minimum of the estimate: for T = a + b·m and noise scale φ at m* = √(aφ/b). Length and
    signal are those with the highest posterior on a small grid. Stateless: equal measurements give equal answers.
    """

    grid: Floats  # rows × jobs
    believed: Floats  # estimated log PD of every row, up to a constant
    noise: float = 0.03  # relative standard deviation of one measurement
    beta: float = 9.0
    min_gain: float = 0.01  # least gain that the next measurement must promise
    most: int = 15  # measurements

    def propose(self, tried: Tried) -> int | None:
        """The row to measure next; None when enough is measured or nothing better is likely."""
        if not tried:
            return int(np.argmin(self.believed))
        if len(tried) >= self.most:
            return None
        mean, std = self._posterior(tried)
        bound = mean - sqrt(self.beta) * std
        row = int(np.argmin(bound))
        if [known for known, _ in tried].count(row) >= _ENOUGH:
            return None
        reached = min(mean[row] for row, _ in tried)
        return row if bound[row] < reached - log1p(self.min_gain) else None

    def best(self, tried: Tried) -> int:
        """The measured row with the lowest posterior mean: measurements alone are noisy."""
        mean, _ = self._posterior(tried)
        return min((row for row, _ in tried), key=lambda row: (mean[row], row))

    def _posterior(self, tried: Tried) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log PD without measurement noise, for every row."""
        rows = [row for row, _ in tried]
        above = np.array([value for _, value in tried]) - self.believed[rows]
        offset = float(above.mean())  # neighbours slow every setting down
        with one_thread():
            process = self._fitted(self.grid[rows], above - offset)
            mean, explained = process.predict(self.grid)
        return self.believed + offset + mean, np.sqrt(np.maximum(process.kernel.signal**2 - explained, 0.0))

    def _fitted(self, rows: Floats, errors: Floats) -> GaussianProcess:
        """The process with the most probable length and signal; one measurement cannot tell."""
        scales = product(_LENGTHS, _SIGNALS) if len(errors) > 1 else [_USUAL]
        kernels = [Matern(length, signal, smooth=True) for length, signal in scales]
        return max([GaussianProcess(kernel, self.noise**2, rows, errors) for kernel in kernels], key=_log_posterior)


def _log_posterior(process: GaussianProcess) -> float:
    kernel = process.kernel
    unusual = log(kernel.length / _USUAL[0]) ** 2 + log(kernel.signal / _USUAL[1]) ** 2
    return -0.5 * (process.misfit + unusual) - process.log_det


def batch_grid(low: int, high: int, own: int, most: int) -> list[int]:
    """Up to `most` batch sizes from low to high in even ratios, including the job's own, ascending."""
    if low >= high or most < 2:
        return [own]
    return sorted({*(round(float(size)) for size in np.geomspace(low, high, most - 1)), own})


_SIZES = {1: 25, 2: 13, 3: 9, 4: 7}  # grid size per job, by the number of jobs tuned together
_MARGIN = 1.1  # on predicted memory
_HOPE = 0.5  # part of the spread added to a guessed rate, so that it is tried
_APART = 1.5  # least ratio between batch sizes worth trying
_GUESS = 0.25  # relative spread from which a rate is a guess


def is_tunable(estimates: Estimator, job: Job) -> bool:
    """Whether a single-device job's batch size may change and its effect on learning is estimated."""
    return job.spec.devices == 1 and _may_change(estimates, job.spec)


def best_alone(estimates: Estimator, job: Job, kind: Kind, capacity: int) -> int:
    """The starting point of tuning: the batch size with the highest goodput that fits; 0: the job's own."""
    if not is_tunable(estimates, job):
        return 0
    sizes = _sizes(estimates, job, _SIZES[4], capacity)
    return max(sizes, key=lambda size: estimates.goodput(job.spec, kind, size).mean)


def best_step(estimates: Estimator, job: Job, place: Placement, capacity: int, *, growth: int, trust: float) -> int:
    """The best batch size of a job in a placement, for an estimator that counts steps.

        g(m) = (rate(m) ± h·its spread) · m/m0 · (φ + m0)/(φ + m)

    Each batch size is at most `growth` times the previous one, up or down, and changes only if another is estimated
    to be `trust` times better. The spread counts in favour of guesses, so that they are tried, and against
    measurements, so that noise does not cause oscillation.
    """
    spec, own = job.spec, estimates.own_batch(job.spec)
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
    """Whether a job's batch size can be tuned from its step rates (`best_step`)."""
    return estimates.counts_steps and _may_change(estimates, job.spec)


class BatchTuning:
    """Tuning of the jobs on one device: PD_i = IF·DT/EFF of each, and Σ w·PD / Σ w as the objective."""

    def __init__(
        self,
        estimates: Estimator,
        kind: Kind,
        jobs: Sequence[Job],
        fraction: float,
        capacity: int,
        only: JobId | None = None,  # the one job to tune; None: all that can be
    ) -> None:
        self._estimates = estimates
        self._kind = kind
        self._jobs = jobs
        weights = np.array([job.spec.weight for job in jobs])
        self._weights = weights / weights.sum() if weights.sum() > 0.0 else np.full(len(jobs), 1.0 / len(jobs))
        tuned = [is_tunable(estimates, job) and only in {None, job.id} for job in jobs]
        most = _SIZES.get(max(1, sum(tuned)), 3)
        axes = [
            _sizes(estimates, job, most, capacity) if may_change else [job.desired.batch_size if job.desired else 0]
            for job, may_change in zip(jobs, tuned, strict=True)
        ]
        own = tuple(estimates.own_batch(job.spec) if len(axis) > 1 else 0 for job, axis in zip(jobs, axes, strict=True))
        self._rows = self._fitting(axes, capacity) or [own]
        self._places = {row: place for place, row in enumerate(self._rows)}
        self._fractions = [job.lane[0] if job.lane else fraction for job in jobs]

    @property
    def is_open(self) -> bool:
        return len(self._rows) > 1

    def degradation(self, vector: Vector) -> float:
        """Logarithm of the weighted mean PD, from the reported rates under this vector."""
        found = [pd for pd, _ in self._measured(vector)]
        return log(float(self._weights @ found))

    def interference(self, vector: Vector) -> dict[JobId, float]:
        return {job.id: slower for job, (_, slower) in zip(self._jobs, self._measured(vector), strict=True)}

    def propose(self, trial: Trial | None, most: int) -> Vector | None:
        tried = self._tried(trial)
        row = self._tuner(trial, most).propose(tried)
        return None if row is None else self._vector(row)

    def best(self, trial: Trial) -> Vector:
        return self._vector(self._tuner(trial, 1).best(self._tried(trial)))

    def _measured(self, vector: Vector) -> list[tuple[float, float]]:
        """(PD, IF) of each job: IF = estimated rate alone over reported rate, PD = IF over goodput."""
        found = []
        for job, setting in zip(self._jobs, vector, strict=True):
            alone = Placement(((self._kind, 1),), batch_size=setting.batch_size)
            slower = self._estimates.rate(job.spec, alone).mean / max(job.rate, 1e-9)
            found.append((slower / self._goodput(job, setting.batch_size), slower))
        return found

    def _goodput(self, job: Job, batch_size: int) -> float:
        if not batch_size:
            return 1.0
        return max(self._estimates.goodput(job.spec, self._kind, batch_size).mean, 1e-9)

    def _tuner(self, trial: Trial | None, most: int) -> Tuner:
        """The tuner; its estimate is each batch size as alone, times the interference measured first."""
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
    return estimates.memory(spec, batch_size) if batch_size else memory_of(estimates, spec)


def _may_change(estimates: Estimator, spec: JobSpec) -> bool:
    may = spec.batch_range is not None and not spec.exact and estimates.predicts_goodput
    return may and estimates.own_batch(spec) > 0


def _sizes(estimates: Estimator, job: Job, most: int, capacity: int) -> list[int]:
    """The grid of one job: its range, within memory."""
    spec, own = job.spec, estimates.own_batch(job.spec)
    assert spec.batch_range is not None
    sizes = batch_grid(*spec.batch_range, own, most)
    fitting = [size for size in sizes if not capacity or _memory(estimates, spec, size) * _MARGIN <= capacity]
    return fitting or [own]
