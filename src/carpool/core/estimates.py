"""Estimates with their spread, and the estimator port that provides them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobId, JobSpec, Kind
from carpool.core.topology import Neighbour, Placement

MixEntry = tuple[JobSpec, float, int]  # a job, its share of the device, its batch size (0: its own)
Goodput = tuple[float, int]  # units of work per second with the best batch size, and that size (0: the job's own)


class Estimate(NamedTuple):
    """A mean and a standard deviation: never a bare float."""

    mean: float
    std: float = 0.0


class Use(NamedTuple):
    """Shares of one device that a job keeps busy when it has the device to itself."""

    sm: float  # streaming multiprocessors
    memory_bw: float


class Estimator(ABC):
    """Predicts rates and remaining work, and learns from reports. Policies only query it.

    Every estimator implements `version`, `rate`, `remaining` and `learn`; the other methods have defaults. The flags
    below tell a policy which of them an estimator overrides, where the policy then plans in another way.

    The length of a job without measurements, profile or number of steps is assumed in three places:

    - `OnlineEstimator.remaining`: the mean of the known lengths, 120 s without any; for policies that sum lengths;
    - the default policy (`_unknown_s`): the median of the jobs in the queue, 300 s without any, scaled by steps; it
      only orders jobs, and one very long job does not move the median;
    - `carpool plan` (`GUESSED_S`): 120 s or the job's time limit, whatever other jobs take; printed with the forecast.
    """

    __slots__ = ()

    predicts_mixes: ClassVar[bool] = False  # `mixed` knows more than `rate` beside neighbours
    tunes_batches: ClassVar[bool] = False  # `goodputs` chooses batch sizes itself
    predicts_goodput: ClassVar[bool] = False  # `goodput` and `memory` tell batch sizes apart
    counts_steps: ClassVar[bool] = False  # rates are steps per second, whatever a step's batch size
    follows_losses: ClassVar[bool] = False  # `learning` answers once enough losses were reported
    predicts_retention: ClassVar[bool] = False  # `retention` knows what shares do, so that policies may choose them
    measures_idle: ClassVar[bool] = False  # `idle` answers some seconds after a job started on several device types

    @property
    @abstractmethod
    def version(self) -> int:
        """Grows whenever an answer may have changed."""

    @abstractmethod
    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Units of work per second the job would do there."""

    @abstractmethod
    def remaining(self, job: Job, at: float) -> Estimate:
        """Units of work still to do."""

    def remaining_of(self, jobs: Sequence[Job], at: float) -> list[float]:
        """The means of `remaining` of many jobs; an override of both must agree."""
        remaining = self.remaining
        return [remaining(job, at).mean for job in jobs]

    @abstractmethod
    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Take in one measurement."""

    def knows_scale(self, spec: JobSpec) -> bool:
        """Whether the job's rates are units of work per second, and not only comparable with each other."""
        return True

    def knows_length(self, job: Job) -> bool:
        """Whether `remaining` rests on evidence about the job, and is not only a guess to plan with."""
        return True

    def similarity_key(self, spec: JobSpec) -> Hashable:
        """What answers about the job alone depend on: its rates without neighbours, memory and batch sizes.

        Two jobs that ask for equally many devices and have equal keys, or one job with equal keys at two times, are
        equally fast everywhere. Must be quick.
        """
        return spec.id, self.version

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        """Bytes on each of its devices with a batch size (0: its own); 0: unknown."""
        return spec.memory_bytes

    def use(self, spec: JobSpec, kind: Kind) -> Use | None:
        """Shares kept busy on a device of that type, at the job's own batch size; None: unknown."""
        return None

    def move_s(self, spec: JobSpec) -> float | None:
        """Seconds for which the job stands still at each change of devices; None: unknown."""
        return None

    def learning(self, job: JobId, steps: float) -> tuple[float, float] | None:
        """How far the loss fell in the last `steps` steps, and its recent mean; None: too few reports."""
        return None

    def own_batch(self, spec: JobSpec) -> int:
        """The batch size of the job itself; 0: not known yet."""
        return spec.batch_size

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        """What a step with a batch size is worth, in steps with the job's own."""
        return 1.0

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        """Progress alone over that at the job's own batch: (m/T(m)) / (m0/T(m0)) · (φ + m0)/(φ + m)."""
        return Estimate(1.0)

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[Goodput]:
        """The best batch size for each number of devices, on one node or over several; rate 0: cannot run."""
        raise NotImplementedError(f"{type(self).__name__} does not tune batch sizes")

    def step_s(self, spec: JobSpec, placement: Placement) -> float:
        """Seconds of one step there, at the job's own batch size."""
        rate = self.rate(spec, placement).mean
        return 1.0 / rate if rate > 0.0 else 1e18

    def steps_left(self, job: Job, at: float) -> float:
        """Steps still to do, at the job's own batch size."""
        return self.remaining(job, at).mean

    def mixed(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> Sequence[Sequence[Estimate]]:
        """Rate of each job of each mix on one device of a type."""
        return [[self._beside_others(kind, mix, place) for place in range(len(mix))] for mix in mixes]

    def retention(self, kind: Kind, mixes: Sequence[Sequence[MixEntry]]) -> Sequence[Sequence[Estimate]]:
        """Rate of each job of each mix on one device of a type, relative to alone on the whole device at its batch."""
        entries = {(spec.id, batch_size): spec for mix in mixes for spec, _, batch_size in mix}
        one = ((kind, 1),)
        alone = {key: self.rate(spec, Placement(one, batch_size=key[1])).mean for key, spec in entries.items()}
        found = []
        for mix, rates in zip(mixes, self.mixed(kind, mixes), strict=True):
            wholes = [max(alone[spec.id, batch_size], 1e-9) for spec, _, batch_size in mix]
            found.append([Estimate(rate.mean / a, rate.std / a) for rate, a in zip(rates, wholes, strict=True)])
        return found

    def predicted_retention(self, spec: JobSpec, placement: Placement) -> Estimate | None:
        """What `retention` would answer without measurements of this group; None: unknown."""
        return None

    def idle(self, spec: JobSpec, groups: tuple[tuple[Kind, int], ...]) -> Mapping[Kind, float]:
        """The portion of its step that the job leaves each type of its devices idle; missing: unknown (yet)."""
        return {}

    def _beside_others(self, kind: Kind, mix: Sequence[MixEntry], place: int) -> Estimate:
        spec, fraction, batch_size = mix[place]
        others = tuple([Neighbour(*other) for other in (*mix[:place], *mix[place + 1 :])])
        return self.rate(spec, Placement(((kind, 1),), fraction, batch_size, others))


@dataclass(frozen=True, slots=True)
class DeclaredEstimator(Estimator):
    """Believes what the spec declares: rate 1.0 on the devices asked for, linear below and above.

    If the shares of a device sum to more than 1, each counts proportionally less.
    """

    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(placement.num_devices / spec.devices * placement.fraction / max(1.0, placement.load))

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def remaining_of(self, jobs: Sequence[Job], at: float) -> list[float]:
        if type(self).remaining is not DeclaredEstimator.remaining:
            return Estimator.remaining_of(self, jobs, at)
        return [job.remaining_at(at) for job in jobs]

    def similarity_key(self, spec: JobSpec) -> Hashable:
        """Rates depend on nothing but the devices asked for."""
        return self.version

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Declarations do not change."""
