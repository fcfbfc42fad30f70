"""What the tried vectors of a mix teach of others: an estimator for one mix, over shares and batch sizes.

A job's rate is what it has alone, times what its neighbours and caps leave it (`Slowdown`), over what a larger batch
costs. With k = m/m0 a batch over the job's own, a step takes

    T(m) / T(m0) = f + (1 − f)·k

f is the part of a step that does not grow with its batch: a half until vectors with other batches have been tried, then
what they showed. What a step with a batch is worth to the training is asked of whoever counts steps (`worth_of_step`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.policies.goodput import own_batch, worth_of_step
from carpool.policies.share_search import Setting, Tenure, Vector
from carpool.policies.slowdown import Slowdown, Solo
from carpool.policies.uses import memory_of

_ERROR = 0.1  # spread of a prediction, relative to it
_FIXED = 0.5  # part of a step that does not grow with its batch, until measured


@dataclass(slots=True)
class Taught:
    """As measured where a vector was tried; elsewhere as slowdowns and batches say."""

    estimates: Estimator
    specs: Sequence[JobSpec]  # of the mix, in its order
    tried: Mapping[Vector, Sequence[float]]  # progress relative to alone with the own batch
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
        """That of what is believed of jobs alone."""
        return self.estimates.version

    def mixed(self, kind: Kind, mixes: Sequence[Sequence[Tenure]]) -> list[list[Estimate]]:
        """Rate of each job of each mix on one device of a kind."""
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
        """Steps per second under a vector, relative to those alone with the own batch."""
        kept = self._model.predict(_shares(vector))
        grown = map(self._factor_less_one, self.specs, vector)
        return [k / (1.0 + (1.0 - fixed) * more) for k, fixed, more in zip(kept, self._fixed, grown, strict=True)]

    def _in_steps(self, vector: Vector, progress: Sequence[float]) -> list[float]:
        places = zip(self.specs, vector, progress, strict=True)
        return [made / worth_of_step(self.estimates, spec, setting.batch_size) for spec, setting, made in places]

    def _fixed_part(self, place: int) -> float:
        """The f of one job, as the vectors with other batches of it showed in the mean."""
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
        """By how much the batch is larger than the own one, relative to it."""
        own = own_batch(self.estimates, spec)
        return setting.batch_size / own - 1.0 if setting.batch_size and own else 0.0

    # ------------------------------------------------------------------------------------- as believed without the mix
    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Of a job by itself."""
        return self.estimates.rate(spec, placement)

    def remaining(self, job: Job, at: float) -> Estimate:
        """Steps still to do."""
        return self.estimates.remaining(job, at)

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        """What a step with a batch is worth, in steps with the job's own."""
        return worth_of_step(self.estimates, spec, batch_size)

    def own_batch(self, spec: JobSpec) -> int:
        """The batch size that its author gave a job; 0: not known yet."""
        return own_batch(self.estimates, spec)

    def memory(self, spec: JobSpec) -> int:
        """Bytes at its own batch size; 0: unknown."""
        return memory_of(self.estimates, spec)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Nothing: trials teach it."""


def _shares(vector: Vector) -> tuple[float, ...]:
    return tuple(setting.fraction for setting in vector)
