"""Time of a step on one device by its batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.optimize import nnls

from carpool.core.estimates import Estimate

_UNSEEN = 0.3  # relative error assumed where two points or fewer say nothing about it


@dataclass(slots=True)
class StepTime:
    """T = a + b·m seconds for a step over m samples: what every step costs, and every sample.

    Fitted by least squares of relative errors, neither a nor b below 0. With one point all is per sample. With the
    gradient noise scale φ the batch of the highest goodput is √(a·φ/b).
    """

    fixed_s_: float = 0.0  # a
    per_sample_s_: float = 0.0  # b
    error_: float = inf  # relative, root mean square

    def fit(self, batches: Sequence[float], seconds: Sequence[float]) -> StepTime:
        """To measured points."""
        sizes, times = np.asarray(batches, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        assert times.min() > 0.0, "steps take time"
        if len(set(batches)) == 1:
            self.fixed_s_, self.per_sample_s_ = 0.0, float(times.mean()) / float(batches[0])
        else:
            scale = float(sizes.max())
            columns = np.stack([np.ones(len(sizes)), sizes / scale], axis=1)
            (fixed, slope), _ = nnls(columns / times[:, None], np.ones(len(sizes)))
            self.fixed_s_, self.per_sample_s_ = float(fixed), float(slope) / scale
        if len(set(batches)) < 3:
            self.error_ = _UNSEEN
            return self
        errors = (self.fixed_s_ + self.per_sample_s_ * sizes) / times - 1.0
        self.error_ = sqrt(float(errors @ errors) / (len(sizes) - 2))
        return self

    def predict(self, batch: float) -> Estimate:
        """Seconds of a step."""
        mean = self.fixed_s_ + self.per_sample_s_ * batch
        return Estimate(mean, mean * self.error_)
