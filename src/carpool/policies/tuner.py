"""Which setting of a few batch sizes to measure next: Bayesian optimisation of performance degradation (GP-LCB)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Floats = NDArray[np.float64]
Tried = Sequence[tuple[int, float]]  # (row of the grid, measured log PD)

_LENGTHS = (0.7, 1.4, 2.8)  # in natural logarithms of the batch size
_SIGNALS = (0.05, 0.1, 0.2, 0.4, 0.8)  # standard deviation of log PD about what is believed
_ENOUGH = 2  # measurements of one row: where it still is the most promising, the search has converged
_USUAL = (1.4, 0.2)  # where too little is measured to tell


@dataclass(frozen=True, slots=True)
class Tuner:
    """Chooses rows of a grid of log batch sizes, one column for each job that is tuned.

        next = argmin μ(x) − √β·σ(x)

    over a Gaussian process with kernel Matérn-5/2 on x = log m (Srinivas et al., 2010; Chen et al.,
    "Interference-aware Multiplexing for Deep Learning in GPU Clusters", SC 2023). It models what log PD is measured
    to be above `believed`, so that the first row is where belief has its minimum: for T = a + b·m and noise scale φ at
    m* = √(aφ/b). Length and signal of the process are those of a small grid with the highest posterior. Nothing is
    remembered between calls: the same measurements give the same answer.
    """

    grid: Floats  # rows × jobs
    believed: Floats  # log PD of every row, up to a constant
    noise: float = 0.03  # relative standard deviation of one measurement
    beta: float = 9.0
    min_gain: float = 0.01  # what the next measurement must be able to bring
    most: int = 15  # measured evaluations

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
        """Of the measured rows the one with the lowest mean: with noise not always the one that looked best."""
        mean, _ = self._posterior(tried)
        return min((row for row, _ in tried), key=lambda row: (mean[row], row))

    def _posterior(self, tried: Tried) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log PD itself, without the noise of a measurement, for every row."""
        with _threads().limit(limits=1, user_api="blas"):  # matrices this small are no work for several
            return self._regress(tried)

    def _regress(self, tried: Tried) -> tuple[Floats, Floats]:
        rows = [row for row, _ in tried]
        seen = self.grid[rows]
        above = np.array([value for _, value in tried]) - self.believed[rows]
        offset = float(above.mean())  # neighbours slow every setting down
        length, signal = self._scales(seen, above - offset)
        factor = cholesky(_covariance(seen, seen, length, signal) + self.noise**2 * np.eye(len(rows)), lower=True)
        cross = _covariance(self.grid, seen, length, signal)
        explained = solve_triangular(factor, cross.T, lower=True)
        mean = self.believed + offset + cross @ cho_solve((factor, True), above - offset)
        return mean, np.sqrt(np.maximum(signal**2 - (explained**2).sum(0), 0.0))

    def _scales(self, seen: Floats, errors: Floats) -> tuple[float, float]:
        """Length and signal of the highest posterior; one measurement says nothing about them."""
        if len(errors) < 2:
            return _USUAL

        def posterior(scales: tuple[float, float]) -> float:
            length, signal = scales
            kernel = _covariance(seen, seen, length, signal) + self.noise**2 * np.eye(len(errors))
            factor = cholesky(kernel, lower=True)
            fit = float(errors @ cho_solve((factor, True), errors))
            unusual = log(length / _USUAL[0]) ** 2 + log(signal / _USUAL[1]) ** 2
            return -0.5 * (fit + unusual) - float(np.log(np.diag(factor)).sum())

        return max(product(_LENGTHS, _SIGNALS), key=posterior)


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()


def _covariance(left: Floats, right: Floats, length: float, signal: float) -> Floats:
    """Matérn-5/2: s²·(1 + r + r²/3)·exp(−r) with r = √5·|x − x'|/ℓ."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2.0 * left @ right.T
    scaled = np.sqrt(np.maximum(squares, 0.0)) * (sqrt(5.0) / length)
    return np.asarray(signal**2 * (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def batch_grid(low: int, high: int, own: int, most: int) -> list[int]:
    """Up to `most` batch sizes from low to high in even ratios, the job's own among them, ascending."""
    if low >= high or most < 2:
        return [own]
    return sorted({*(round(float(size)) for size in np.geomspace(low, high, most - 1)), own})
