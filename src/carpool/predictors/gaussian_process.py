"""Gaussian process regression on standardized features, hyperparameters by likelihood on a grid."""

from __future__ import annotations

from itertools import product
from math import inf, sqrt

import numpy as np

from carpool.numerics import Floats, GaussianProcess, Matern, one_thread

_LENGTHS = (1.0, 2.0, 4.0, 8.0)  # candidates, in units of the distances below
_NOISES = (0.003, 0.01, 0.03, 0.1)  # variance of a measurement, relative to the signal's


class GaussianRegressor:
    """Regression with a Matérn-3/2 kernel over distances divided by √(number of features).

    The signal's variance is the one that maximizes the likelihood for given length and noise (Rasmussen and Williams,
    2006, section 5.4), so only those two are searched: sixteen factorizations, no restarts, reproducible.
    """

    def __init__(self, lengths: tuple[float, ...] = _LENGTHS, noises: tuple[float, ...] = _NOISES) -> None:
        self.lengths = lengths
        self.noises = noises

    def fit(self, features: Floats, targets: Floats) -> GaussianRegressor:
        with one_thread():
            self._fit(features, targets)
        return self

    def _fit(self, features: Floats, targets: Floats) -> None:
        self.center_, spread = features.mean(0), features.std(0)
        self.scale_ = np.where(spread > 1e-9, spread, 1.0) * sqrt(features.shape[1])
        self.mean_ = float(targets.mean())
        rows, errors = (features - self.center_) / self.scale_, targets - self.mean_
        size, best = len(targets), -inf
        kernels = [Matern(length) for length in self.lengths]
        covariances = [kernel(rows, rows) for kernel in kernels]
        for (kernel, covariance), noise in product(zip(kernels, covariances, strict=True), self.noises):
            process = GaussianProcess(kernel, noise, rows, errors, covariance)
            variance = max(process.misfit / size, 1e-12)
            likelihood = -0.5 * size * np.log(variance) - process.log_det
            if likelihood > best:
                best, self.process_, self.variance_ = likelihood, process, variance

    def predict(self, features: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the value that a measurement would give."""
        with one_thread():
            mean, explained = self.process_.predict((features - self.center_) / self.scale_)
        left = np.maximum(1.0 + self.process_.noise - explained, 1e-9)
        return self.mean_ + mean, np.sqrt(self.variance_ * left)
