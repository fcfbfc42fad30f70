"""World interface: true rates and costs of jobs, the plain world, and the oracle estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Generic, NamedTuple, TypeVar

from carpool.core.errors import InputError
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.sim.traces.trace import Arrival


class Pace(NamedTuple):
    """A rate that holds until the job has done `until` units of work, such as the end of an epoch."""

    rate: float
    until: float = inf


class TrainingSignals(NamedTuple):
    """What a training reports in addition to its rate."""

    loss: float | None = None
    noise: float | None = None  # gradient noise scale, in samples
    step_s: float | None = None  # seconds of one step, synchronisation included
    sync_s: float | None = None  # of these, seconds of exposed synchronisation


class World(ABC):
    """True lengths, rates and costs of jobs. Policies see only its estimator and the facts it causes.

    By default a trace's own lengths are true, starting and moving cost `start_s` and `resize_s`, and a crash loses
    nothing.
    """

    __slots__ = ()

    bounds_jct: ClassVar[bool] = False  # whether `weighted_jct_bound_s` answers
    start_s: float = 0.0  # stall when a job starts
    resize_s: float = 0.0  # stall when it moves
    report_every_s: float = 0.0  # how often running jobs report; 0: only when something changes

    def prepare(self, arrivals: Sequence[Arrival], cluster: Cluster) -> tuple[Sequence[Arrival], Cluster]:
        """Jobs and devices with the fields filled in that this world knows; InputError for unknown ones."""
        for _, spec in arrivals:
            self.work(spec)
        return arrivals, cluster

    def work(self, spec: JobSpec) -> float:
        """Units of work the job really needs."""
        if spec.work is None:
            raise InputError(
                f"job {spec.id!r} has no length, and this --world knows none",
                way_out="Add a column work_s to the trace, or choose a --world that knows how long its models train.",
            )
        return spec.work

    @abstractmethod
    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        """The job's true rate there, after `done` units of work."""

    def change_s(self, spec: JobSpec, before: Placement | None, after: Placement) -> float:
        """Seconds of stall when the job starts (`before` is None), moves or is resized.

        With `before == after` the job moves to other devices of the same types. With equal groups and another share,
        batch size or turn it keeps its devices.
        """
        return self.start_s if before is None else self.resize_s

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """What the training reports there after `done` units of work, beside its rate."""
        return TrainingSignals()

    def checkpointed(self, spec: JobSpec, done: float) -> float:
        """Units of work that survive a crash after `done`."""
        return done

    @abstractmethod
    def estimator(self) -> Estimator:
        """The estimator with what a scheduler may know about this world."""

    def weighted_jct_bound_s(self, arrivals: Sequence[Arrival], cluster: Cluster) -> float | None:
        """A lower bound on Σ w·jct / Σ w of these jobs on these devices; None: unknown."""
        return None


@dataclass(frozen=True, slots=True)
class PlainWorld(World):
    """The trace's own durations: rate 1 on the devices asked for, linear in the number of devices.

    Jobs that share a device run at their fraction, scaled down where the fractions sum past one.
    """

    checkpoint_every: float = 0.0  # units of work; 0: nothing is lost in a crash
    start_s: float = 0.0
    resize_s: float = 0.0

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        count = placement.num_devices
        rate = 1.0 if count == spec.devices else count / spec.devices
        if placement.fraction != 1.0 or placement.neighbours:
            rate *= placement.fraction / max(1.0, placement.load)
        return Pace(rate)

    def checkpointed(self, spec: JobSpec, done: float) -> float:
        return done - done % self.checkpoint_every if self.checkpoint_every else done

    def estimator(self) -> Estimator:
        return DeclaredEstimator()


class SteadyWorld(World):
    """A world in which a job's rate depends only on where it runs."""

    __slots__ = ()

    @abstractmethod
    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Units of work per second there."""

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        return Pace(self.rate(spec, placement))


W_co = TypeVar("W_co", bound=SteadyWorld, covariant=True)


@dataclass(frozen=True, slots=True)
class Oracle(Estimator, Generic[W_co]):
    """Knows every true rate and length of its world."""

    world: W_co
    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(self.world.rate(spec, placement))

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Ignored: the truth does not change."""
