"""What the tried vectors of a mix teach of others: each job's slowdown, by its own cap and its neighbours' work.

With s the shares, x_i job i's speed relative to alone on the whole device, and y_j that of job j alone under its cap,

    1/x_i = 1 + h_i·(1/s_i − 1) + Σ_{j≠i} (c_ij·(0.7·y_j + 0.3·s_j) + d_ij·s_j^8)        h, c, d ≥ 0
    1/y_j = 1 + h_j·(1/s_j − 1)

The first term is Amdahl's law for a cap: h, the hunger, is the part of a step that more multiprocessors shorten;
measuring a job alone under its cap shows it. The second is what neighbours take: mostly in proportion to the work they
get done under their caps, since capping one that needs few multiprocessors spares the others little; and far more where
a cap leaves no multiprocessor free of them. Fitted to the vectors tried by non-negative least squares of relative
errors, and held near what is typical while there are few. After the throughput estimator of competitive sharing (task
combination and shares in, throughput out); the form is ours, chosen on seven mixes on an H200
(`benchmarks/share_model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Shares = tuple[float, ...]
Solo = tuple[float, float]  # a cap, and the speed alone under it relative to the whole device

_WORK = 0.7  # of what a neighbour takes: by the work it gets done; the rest by its cap
_CROWDS = 8  # exponent of the term that matters only near whole caps
_TYPICAL = (0.3, 0.4, 0.4)  # h, c and d before anything is tried
_DOUBT = 0.02  # weight of the typical numbers against one measured vector
_LEAST = 1e-3


class Slowdown:
    """Fitted to one mix."""

    def fit(
        self, shares: Sequence[Shares], speeds: Sequence[Sequence[float]], solos: Sequence[Sequence[Solo]] = ()
    ) -> Slowdown:
        """Learn from vectors of shares and the speeds they gave, and from each job alone under some caps."""
        from scipy.optimize import nnls  # half a second to import

        count = len(shares[0])
        typical_hunger, takes, crowds = _TYPICAL
        self.hungers_ = [hunger(own) for own in solos] if solos else [typical_hunger] * count
        typical = np.array([typical_hunger, *[takes] * (count - 1), *[crowds] * (count - 1)])
        doubt = np.sqrt(_DOUBT) * np.eye(len(typical))
        self.numbers_: list[Floats] = []
        for place in range(count):
            rows = [self._row(vector, place) for vector in shares]
            kept = [speed[place] for speed in speeds]
            for share, speed in solos[place] if solos else ():
                rows.append(self._row([share if other == place else 0.0 for other in range(count)], place))
                kept.append(speed)
            known = np.clip(kept, _LEAST, 1.0)
            wanted = 1.0 - known  # (1/x − 1)·x: errors relative to the slowdown
            left = np.vstack([np.array(rows) * known[:, None], doubt])
            self.numbers_.append(nnls(left, np.concatenate([wanted, np.sqrt(_DOUBT) * typical]))[0])
        return self

    def predict(self, shares: Shares) -> list[float]:
        """Speeds relative to alone under a vector."""
        return [1.0 / (1.0 + float(self._row(shares, place) @ own)) for place, own in enumerate(self.numbers_)]

    def _row(self, shares: Sequence[float], place: int) -> Floats:
        others = [other for other in range(len(shares)) if other != place]
        takes = [_WORK * _capped(self.hungers_[o], shares[o]) + (1.0 - _WORK) * shares[o] for o in others]
        return np.array([1.0 / shares[place] - 1.0, *takes, *[shares[other] ** _CROWDS for other in others]])


def hunger(solos: Sequence[Solo]) -> float:
    """The h of a job by itself; the typical one where it was not measured under a cap."""
    shown = [(1.0 / max(speed, _LEAST) - 1.0) / (1.0 / share - 1.0) for share, speed in solos if share < 1.0]
    return max(0.0, sum(shown) / len(shown)) if shown else _TYPICAL[0]


def _capped(hunger: float, share: float) -> float:
    """Speed alone under a cap; nothing where a job is not there."""
    return 1.0 / (1.0 + hunger * (1.0 / share - 1.0)) if share > 0.0 else 0.0
