"""Step time and memory of a training on one device as functions of its batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimate

_UNSEEN_TIME = 0.3  # relative error assumed if two points or fewer leave it undetermined


@dataclass(slots=True)
class StepTime:
    """T = a + b·m seconds for a step over m samples.

    Fitted by least squares of relative errors, a and b non-negative. One point counts as all per sample. With
    gradient noise scale φ the batch size of highest goodput is √(a·φ/b).
    """

    fixed_s_: float = 0.0  # a
    per_sample_s_: float = 0.0  # b
    error_: float = inf  # relative, root mean square

    def fit(self, batches: Sequence[float], seconds: Sequence[float]) -> StepTime:
        sizes, times = np.asarray(batches, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        assert times.min() > 0.0, "steps take time"
        if len(set(batches)) == 1:
            self.fixed_s_, self.per_sample_s_ = 0.0, float(times.mean()) / float(batches[0])
        else:
            scale = float(sizes.max())
            columns = np.stack([np.ones(len(sizes)), sizes / scale], axis=1)
            fixed, slope = _non_negative(columns / times[:, None])
            self.fixed_s_, self.per_sample_s_ = float(fixed), float(slope) / scale
        if len(set(batches)) < 3:
            self.error_ = _UNSEEN_TIME
            return self
        errors = (self.fixed_s_ + self.per_sample_s_ * sizes) / times - 1.0
        self.error_ = sqrt(float(errors @ errors) / (len(sizes) - 2))
        return self

    def predict(self, batch: float) -> Estimate:
        mean = self.fixed_s_ + self.per_sample_s_ * batch
        return Estimate(mean, mean * self.error_)


Floats = NDArray[np.float64]

_TERMS = 4
_UNSEEN_MEMORY = 0.05  # relative error assumed if too few points leave it undetermined


@dataclass(slots=True)
class MemoryModel:
    """Bytes = c0 + c1·m + c2·m² + c3·m³ for m samples on the device, no coefficient negative.

    The cubic is IADeep's memory constraint; weights, optimizer and data are c0, activations c1, attention over a
    batch-sized set c2. Being monotone, it has a well-defined largest batch size that fits. Errors are relative.

    `margin_` is the worst excess of a point over its prediction from the others, and at least twice the usual
    error.
    """

    least_margin: float = 0.02
    coefficients_: Floats = field(default_factory=lambda: np.zeros(_TERMS))
    error_: float = inf  # relative, root mean square over points left out one by one
    margin_: float = inf

    def fit(self, batches: Sequence[float], num_bytes: Sequence[float]) -> MemoryModel:
        sizes, taken = np.asarray(batches, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
        assert taken.min() > 0.0, "a process takes memory"
        self.coefficients_ = _coefficients(sizes, taken)
        errors = taken / _left_out(sizes, taken) - 1.0 if len(sizes) > 2 else np.array([_UNSEEN_MEMORY])
        self.error_ = sqrt(float(np.mean(errors**2)))
        self.margin_ = max(self.least_margin, float(errors.max()), 2.0 * self.error_)
        return self

    def predict(self, batch: float) -> Estimate:
        mean = float(_cubic(self.coefficients_, np.array([batch]))[0])
        return Estimate(mean, mean * self.error_)

    def bound(self, batch: float) -> float:
        """Bytes to reserve for a process with this batch size: the prediction and the margin."""
        return self.predict(batch).mean * (1.0 + self.margin_)

    def largest(self, capacity_bytes: float) -> int:
        """The largest batch size whose bound fits; 0 if none does."""
        if self.bound(1) > capacity_bytes:
            return 0
        low, high = 1, 2
        while self.bound(high) <= capacity_bytes and high < 1 << 40:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bound(middle) <= capacity_bytes else (low, middle)
        return low


def _coefficients(sizes: Floats, taken: Floats) -> Floats:
    """Non-negative least squares of relative errors, with scaled sizes."""
    scale = float(sizes.max())
    powers = np.vander(sizes / scale, _TERMS, increasing=True)[:, : min(_TERMS, len(sizes))]
    found = np.zeros(_TERMS)
    found[: powers.shape[1]] = _non_negative(powers / taken[:, None])
    return found / scale ** np.arange(_TERMS)


def _non_negative(rows: Floats) -> Floats:
    """Non-negative coefficients with which each row gives 1, by least squares."""
    from scipy.optimize import nnls  # takes longer to import than the rest of this package: only where it is used

    return np.asarray(nnls(rows, np.ones(len(rows)))[0])


def _left_out(sizes: Floats, taken: Floats) -> Floats:
    """Each point as predicted from the others."""
    places = np.arange(len(sizes))
    return np.array(
        [
            _cubic(_coefficients(sizes[places != place], taken[places != place]), sizes[place : place + 1])[0]
            for place in places
        ]
    )


def _cubic(coefficients: Floats, sizes: Floats) -> Floats:
    return np.asarray(np.vander(sizes, _TERMS, increasing=True) @ coefficients)
