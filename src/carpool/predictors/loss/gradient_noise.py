"""Gradient noise scale: the batch size beyond which more samples stop helping.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018; extended to parts of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimate

Floats = NDArray[np.float64]


@dataclass(slots=True)
class NoiseScale:
    """Learns φ = tr(Σ)/|G|² from one batch at a time, cut into n small parts of b_i samples, B = Σ b_i.

        local = Σ (b_i/B)·|g_i|²        total = |Σ (b_i/B)·g_i|²

        tr    = B·(local − total)/(n − 1)        |G|² = (n·total − local)/(n − 1)

    Both are unbiased, their ratio is not: so numerator and denominator are averaged separately, the newest step
    with weight `newest` (a plain mean over the first 1/`newest` steps).
    """

    newest: float = 0.05
    num_steps_: int = 0
    mean_: Floats = field(default_factory=lambda: np.zeros(2))  # tr(Σ) in samples, |G|²
    spread_: Floats = field(default_factory=lambda: np.zeros((2, 2)))  # their covariance from step to step

    def partial_fit(self, sizes: Sequence[int], part_norms: Sequence[float], total_norm: float) -> NoiseScale:
        """Add one batch: samples of each part, |g_i|² of its mean gradient, and |g|² of the batch's."""
        count, whole = len(sizes), sum(sizes)
        assert count > 1, "noise cannot be measured with one part"
        local = sum(size / whole * norm for size, norm in zip(sizes, part_norms, strict=True))
        seen = np.array([whole * (local - total_norm), count * total_norm - local]) / (count - 1)
        self.num_steps_ += 1
        weight = max(self.newest, 1.0 / self.num_steps_)
        off = seen - self.mean_
        self.mean_ = self.mean_ + weight * off
        self.spread_ = (1.0 - weight) * (self.spread_ + weight * np.outer(off, off))
        return self

    def predict(self) -> Estimate:
        """φ in samples; infinite where noise dominates the gradient, NaN before the first batch."""
        if not self.num_steps_:
            return Estimate(nan, inf)
        trace, gradient = map(float, self.mean_)
        if gradient <= 0.0:
            return Estimate(inf, inf)
        scale = max(0.0, trace) / gradient
        return Estimate(scale, self._error(trace, gradient, scale))

    def _error(self, trace: float, gradient: float, scale: float) -> float:
        steps = min(self.num_steps_, 2.0 / self.newest - 1.0)
        slope = np.array([1.0, -scale]) / gradient
        variance = float(slope @ self.spread_ @ slope)
        return sqrt(max(0.0, variance) / max(1.0, steps - 1.0)) if trace > 0.0 else inf
