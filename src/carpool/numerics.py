"""Numerics that policies and predictors share: a Gaussian process, and BLAS limited to one thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Floats = NDArray[np.float64]


def one_thread() -> Any:
    """Limit BLAS to one thread: small matrices gain nothing from more, and sums do not depend on the core count."""
    return _threads().limit(limits=1, user_api="blas")


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()


@dataclass(frozen=True, slots=True)
class Matern:
    """Matérn kernel with ν = 3/2 or, if `smooth`, 5/2.

    s²·(1 + r)·exp(−r) or s²·(1 + r + r²/3)·exp(−r), with r = √(2ν)·|x − x'|/ℓ.
    """

    length: float
    signal: float = 1.0
    smooth: bool = False

    def __call__(self, left: Floats, right: Floats) -> Floats:
        squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2.0 * left @ right.T
        scaled = np.sqrt(np.maximum(squares, 0.0)) * (sqrt(5.0 if self.smooth else 3.0) / self.length)
        shape = 1.0 + scaled + scaled**2 / 3.0 if self.smooth else 1.0 + scaled
        return np.asarray(self.signal**2 * shape * np.exp(-scaled))


class GaussianProcess:
    """Posterior of a zero-mean Gaussian process, given values measured at some rows with noise variance `noise`.

    `misfit` is yᵀK⁻¹y and `log_det` is ½·log|K|, from which a caller computes the likelihood of its kernel. The prior
    mean is zero: a caller with another one subtracts it from the values and adds it to the predictions.
    """

    def __init__(
        self, kernel: Matern, noise: float, rows: Floats, values: Floats, covariance: Floats | None = None
    ) -> None:
        from scipy.linalg import cho_solve, cholesky  # imported where it is used: importing it takes as long as numpy

        covariance = kernel(rows, rows) if covariance is None else covariance  # of the rows, if it is known
        self.kernel, self.noise, self._rows = kernel, noise, rows
        self._factor = cholesky(covariance + noise * np.eye(len(values)), lower=True)
        self._weights = cho_solve((self._factor, True), values)
        self.misfit = float(values @ self._weights)
        self.log_det = float(np.log(np.diag(self._factor)).sum())

    def predict(self, rows: Floats) -> tuple[Floats, Floats]:
        """The mean at each row, and the part of the prior variance that the measurements explain."""
        from scipy.linalg import solve_triangular

        cross = self.kernel(rows, self._rows)
        explained = solve_triangular(self._factor, cross.T, lower=True)
        return cross @ self._weights, (explained**2).sum(0)
