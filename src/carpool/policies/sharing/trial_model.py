"""Slowdown model of one job mix, fitted to measured share vectors and batch sizes.

With s the shares, x_i job i's speed relative to alone on the whole device, and y_j that of job j alone under its cap,

    1/x_i = 1 + h_i·(1/s_i − 1) + Σ_{j≠i} (c_ij·(0.7·y_j + 0.3·s_j) + d_ij·s_j^8)        h, c, d ≥ 0
    1/y_j = 1 + h_j·(1/s_j − 1)

The first term is Amdahl's law for a cap: h, the SM sensitivity, is the part of a step that more multiprocessors
shorten; measuring a job alone under its cap shows it. The second is interference: mostly in proportion to the work
neighbours do under their caps, since capping a job that needs few multiprocessors helps the others little, and far more
where no multiprocessor is free of them. Fitted by non-negative least squares of relative errors, regularized towards
typical values while few vectors are measured. After the throughput estimator of competitive sharing; the form is ours,
chosen on seven mixes on an H200 (`benchmarks/share_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimate, Estimator, MixEntry
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.policies.estimator_queries import memory_of, worth_of_step
from carpool.policies.sharing.share_search import Setting, Vector

Floats = NDArray[np.float64]
Shares = tuple[float, ...]
Solo = tuple[float, float]  # a cap, and the speed alone under it relative to the whole device

_WORK = 0.7  # part of interference by work done; the rest by cap
_CROWDS = 8  # exponent of the term for nearly whole caps
_TYPICAL = (0.3, 0.4, 0.4)  # h, c and d before any measurement
_DOUBT = 0.02  # weight of the typical values against one measured vector
_LEAST = 1e-3


class Slowdown:
    """The slowdown model, fitted to one mix."""

    def fit(
        self, shares: Sequence[Shares], speeds: Sequence[Sequence[float]], solos: Sequence[Sequence[Solo]] = ()
    ) -> Slowdown:
        """Fit to measured vectors of shares and their speeds, and to jobs measured alone under caps."""
        from scipy.optimize import nnls  # half a second to import

        count = len(shares[0])
        typical_sensitivity, takes, crowds = _TYPICAL
        self.sensitivities_ = [sm_sensitivity(own) for own in solos] if solos else [typical_sensitivity] * count
        typical = np.array([typical_sensitivity, *[takes] * (count - 1), *[crowds] * (count - 1)])
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
        return [1.0 / (1.0 + float(self._row(shares, place) @ own)) for place, own in enumerate(self.numbers_)]

    def _row(self, shares: Sequence[float], place: int) -> Floats:
        others = [other for other in range(len(shares)) if other != place]
        takes = [_WORK * _capped(self.sensitivities_[o], shares[o]) + (1.0 - _WORK) * shares[o] for o in others]
        return np.array([1.0 / shares[place] - 1.0, *takes, *[shares[other] ** _CROWDS for other in others]])


def sm_sensitivity(solos: Sequence[Solo]) -> float:
    """Fitted h of a job alone; the typical value if it was not measured under a cap."""
    shown = [(1.0 / max(speed, _LEAST) - 1.0) / (1.0 / share - 1.0) for share, speed in solos if share < 1.0]
    return max(0.0, sum(shown) / len(shown)) if shown else _TYPICAL[0]


def _capped(sm_sensitivity: float, share: float) -> float:
    """Speed alone under a cap; 0 if the job is absent."""
    return 1.0 / (1.0 + sm_sensitivity * (1.0 / share - 1.0)) if share > 0.0 else 0.0


_ERROR = 0.1  # spread of a prediction, relative to it
_FIXED = 0.5  # f until measured


@dataclass(slots=True)
class TrialModel(Estimator):
    """Rates of a mix: as measured for tried vectors, elsewhere by `Slowdown` and batch size.

    With k = m/m0 the batch size over the job's own, a step takes T(m) / T(m0) = f + (1 − f)·k, where f is the part
    that does not grow with the batch, 0.5 until vectors with other batch sizes were measured.
    """

    predicts_mixes: ClassVar[bool] = True
    counts_steps: ClassVar[bool] = True

    estimates: Estimator
    specs: Sequence[JobSpec]  # of the mix, in its order
    tried: Mapping[Vector, Sequence[float]]  # progress relative to alone at the own batch size
    solos: Sequence[Sequence[Solo]] = ()  # of each job
    _model: Slowdown = field(default_factory=Slowdown)
    _fixed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        as_written = {
            v: speeds for v, speeds in self.tried.items() if not any(map(self._factor_less_one, self.specs, v))
        }
        known = as_written or self.tried
        self._model.fit([_shares(vector) for vector in known], list(known.values()), self.solos)
        self._fixed = [self._fixed_part(place) for place in range(len(self.specs))]

    @property
    def version(self) -> int:
        return self.estimates.version

    def mixed(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> list[list[Estimate]]:
        found = []
        for mix in mixes:
            vector = tuple(Setting(fraction, batch_size) for _, fraction, batch_size in mix)
            known = self.tried.get(vector)
            speeds = self._believed(vector) if known is None else self._in_steps(vector, known)
            alone = [self.estimates.rate(spec, Placement(((kind, 1),))).mean for spec, _, _ in mix]
            spread = 0.0 if known is not None else _ERROR
            found.append([Estimate(a * s, a * s * spread) for a, s in zip(alone, speeds, strict=True)])
        return found

    def _believed(self, vector: Vector) -> list[float]:
        """Steps per second under a vector, relative to alone at the own batch size."""
        kept = self._model.predict(_shares(vector))
        grown = map(self._factor_less_one, self.specs, vector)
        return [k / (1.0 + (1.0 - fixed) * more) for k, fixed, more in zip(kept, self._fixed, grown, strict=True)]

    def _in_steps(self, vector: Vector, progress: Sequence[float]) -> list[float]:
        places = zip(self.specs, vector, progress, strict=True)
        return [made / worth_of_step(self.estimates, spec, setting.batch_size) for spec, setting, made in places]

    def _fixed_part(self, place: int) -> float:
        """Fitted f of one job: the mean over measured vectors with other batch sizes."""
        shown = []
        for vector, progress in self.tried.items():
            more = self._factor_less_one(self.specs[place], vector[place])
            if more:
                longer = self._model.predict(_shares(vector))[place] / max(
                    self._in_steps(vector, progress)[place], 1e-9
                )
                shown.append(min(1.0, max(0.0, 1.0 - (longer - 1.0) / more)))
        return sum(shown) / len(shown) if shown else _FIXED

    def _factor_less_one(self, spec: JobSpec, setting: Setting) -> float:
        own = self.estimates.own_batch(spec)
        return setting.batch_size / own - 1.0 if setting.batch_size and own else 0.0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return self.estimates.rate(spec, placement)

    def remaining(self, job: Job, at: float) -> Estimate:
        return self.estimates.remaining(job, at)

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        return worth_of_step(self.estimates, spec, batch_size)

    def own_batch(self, spec: JobSpec) -> int:
        return self.estimates.own_batch(spec)

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return memory_of(self.estimates, spec)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Learns nothing from reports, only from trials."""


def _shares(vector: Vector) -> tuple[float, ...]:
    return tuple(setting.fraction for setting in vector)
