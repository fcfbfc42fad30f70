"""Gaussian process regression: Matérn-3/2 on standardized features, hyperparameters by likelihood on a grid."""

from __future__ import annotations

from itertools import product
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from carpool.predictors.blas_threads import one_thread

Floats = NDArray[np.float64]

_LENGTHS = (1.0, 2.0, 4.0, 8.0)  # in root mean squares of the standardised distance
_NOISES = (0.003, 0.01, 0.03, 0.1)  # variance of a measurement, relative to the signal's


class GaussianProcess:
    """Regression with k(r) = (1 + √3·r/ℓ)·exp(−√3·r/ℓ), r the distance over √(number of features).

    The signal's variance is the one that maximises the likelihood for given ℓ and noise (Rasmussen and Williams, 2006,
    section 5.4), so that only those two are searched: sixteen factorisations, no restarts, the same result every time.
    """

    def __init__(self, lengths: tuple[float, ...] = _LENGTHS, noises: tuple[float, ...] = _NOISES) -> None:
        self.lengths = lengths
        self.noises = noises

    def fit(self, features: Floats, targets: Floats) -> GaussianProcess:
        """From scratch, to all rows."""
        with one_thread():
            self._fit(features, targets)
        return self

    def _fit(self, features: Floats, targets: Floats) -> None:
        self.center_, spread = features.mean(0), features.std(0)
        self.scale_ = np.where(spread > 1e-9, spread, 1.0) * sqrt(features.shape[1])
        self.mean_ = float(targets.mean())
        self.rows_ = (features - self.center_) / self.scale_
        size = len(targets)
        errors = targets - self.mean_
        best = -inf
        kernels = {length: _kernel(self.rows_, self.rows_, length) for length in self.lengths}
        for length, noise in product(self.lengths, self.noises):
            factor = cholesky(kernels[length] + noise * np.eye(size), lower=True)
            weights = cho_solve((factor, True), errors)
            variance = max(float(errors @ weights) / size, 1e-12)
            likelihood = -0.5 * size * np.log(variance) - float(np.log(np.diag(factor)).sum())
            if likelihood > best:
                best = likelihood
                self.length_, self.noise_, self.variance_ = length, noise, variance
                self.factor_, self.weights_ = factor, weights

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of what a measurement would show."""
        with one_thread():
            cross = _kernel((features - self.center_) / self.scale_, self.rows_, self.length_)
            explained = solve_triangular(self.factor_, cross.T, lower=True)
        left = np.maximum(1.0 + self.noise_ - (explained**2).sum(0), 1e-9)
        return self.mean_ + cross @ self.weights_, np.sqrt(self.variance_ * left)


def _kernel(left: Floats, right: Floats, length: float) -> Floats:
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2.0 * left @ right.T
    scaled = np.sqrt(np.maximum(squares, 0.0)) * (sqrt(3.0) / length)
    return np.asarray((1.0 + scaled) * np.exp(-scaled))
