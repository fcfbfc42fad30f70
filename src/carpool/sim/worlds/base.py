"""World interface: true rates and costs of jobs, the plain world, and the oracle estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.sim.traces.trace import Arrival


class Pace(NamedTuple):
    """A rate that holds until the job has done `until` units of work (an epoch's end, say)."""

    rate: float
    until: float = inf


class TrainingSignals(NamedTuple):
    """What a training shows of itself at some point of its work, where it runs."""

    loss: float | None = None
    noise: float | None = None  # gradient noise scale, in samples
    step_s: float | None = None  # seconds of one step, synchronisation included
    sync_s: float | None = None  # of these, seconds of synchronisation that nothing hid


class World(Protocol):
    """Answers for the truth. Policies never see it, only an estimator made from it and the facts it causes."""

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Jobs and devices with what this world knows of them filled in; InputError for those it does not know."""
        ...

    def work(self, spec: JobSpec) -> float:
        """Units of work the job really needs."""
        ...

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """How fast the job really gets on there, after `done` units of work."""
        ...

    def price(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """Seconds of standstill when the job starts (`before` is None), moves or is resized.

        Equal groups and everything else equal: it moves to other devices of the same shape. Equal groups and something
        else unequal: it stays on its devices, and only that changes.
        """
        ...

    def signs(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """What the training shows there after `done` units of work."""
        ...

    def kept(self, spec: JobSpec, done: float) -> float:
        """Units of work that survive a crash after `done`: the last checkpoint."""
        ...

    def estimator(self) -> Estimator:
        """What a scheduler may know of this world."""
        ...


@runtime_checkable
class HasReportInterval(Protocol):
    """A world whose trainings report of themselves at fixed intervals, unless a run is told otherwise."""

    report_every_s: float


@runtime_checkable
class HasLowerBound(Protocol):
    """A world that can tell what no policy can beat."""

    def weighted_jct_bound_s(self, arrivals: Sequence[Arrival], cluster: Cluster) -> float:
        """A lower bound on Σ w·jct / Σ w of these jobs on these devices."""
        ...


@dataclass(frozen=True, slots=True)
class PlainWorld:
    """The trace's own durations: rate 1 on the devices asked for, in proportion on fewer, nothing costs anything.

    Jobs that share a device get on at their fraction, scaled down where the fractions sum past one.
    """

    checkpoint_every: float = 0.0  # units of work; 0: nothing is lost in a crash
    start_s: float = 0.0  # standstill when a job starts
    resize_s: float = 0.0  # standstill when it moves

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Everything as it is; a job without a length cannot be run here."""
        for _, spec in arrivals:
            if spec.work is None:
                raise InputError(
                    f"job {spec.id!r} has no length, and the plain world knows none",
                    way_out="Use a --world that knows how long its model runs.",
                )
        return arrivals, cluster

    def work(self, spec: JobSpec) -> float:
        """What the trace says."""
        assert spec.work is not None, "`prepare` refuses jobs without a length"
        return spec.work

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """In proportion to the devices held and the share of them."""
        count = placement.num_devices
        rate = 1.0 if count == spec.devices else count / spec.devices
        if placement.fraction != 1.0 or placement.neighbours:
            rate *= placement.fraction / max(1.0, placement.load)
        return Pace(rate)

    def price(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """Fixed prices."""
        return self.start_s if before is None else self.resize_s

    def signs(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """Nothing to see."""
        return TrainingSignals()

    def kept(self, spec: JobSpec, done: float) -> float:
        """The last multiple of the checkpoint interval."""
        return done - done % self.checkpoint_every if self.checkpoint_every else done

    def estimator(self) -> Estimator:
        """The declared lengths are the truth."""
        return DeclaredEstimator()


class HasRate(Protocol):
    """A world in which a job's rate hangs only on where it runs."""

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Units of work per second there."""
        ...


W_co = TypeVar("W_co", bound=HasRate, covariant=True)


@dataclass(frozen=True, slots=True)
class Oracle(Estimator, Generic[W_co]):
    """Knows every rate and every length; what else its world knows, the oracle of that world tells."""

    world: W_co
    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """The true rate."""
        return Estimate(self.world.rate(spec, placement))

    def remaining(self, job: Job, at: float) -> Estimate:
        """Declared work less work done."""
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Nothing to learn: the truth does not change."""
