"""Estimates with their spread, and the estimator port that provides them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec
from carpool.core.topology import Placement


class Estimate(NamedTuple):
    """A mean and a standard deviation: never a bare float."""

    mean: float
    std: float = 0.0


class Use(NamedTuple):
    """Shares of one device that a job keeps busy when it has the device to itself."""

    sm: float  # streaming multiprocessors
    memory_bw: float


class Estimator(Protocol):
    """Answers for rates and remaining work, and learns from reports. Injected; policies only ask."""

    @property
    def version(self) -> int:
        """Grows whenever an answer may have changed."""
        ...

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Units of work per second the job would do there."""
        ...

    def remaining(self, job: Job, at: float) -> Estimate:
        """Units of work still to do."""
        ...

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Take in one measurement."""
        ...


@runtime_checkable
class KnowsScale(Protocol):
    """An estimator that says of some jobs only how places compare, until they have run."""

    def knows_scale(self, spec: JobSpec) -> bool:
        """Whether its rates of a job are units of work per second."""
        ...


@dataclass(frozen=True, slots=True)
class DeclaredEstimator:
    """Believes what the spec declares: full rate 1.0 on the width asked for, linear below and above it.

    Where the shares of a device sum past the whole of it, each is worth so much less.
    """

    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """Width held over width asked for, times the share of each device."""
        return Estimate(placement.num_devices / spec.devices * placement.fraction / max(1.0, placement.load))

    def remaining(self, job: Job, at: float) -> Estimate:
        """Declared work less work done."""
        return Estimate(job.remaining_at(at))

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        """Nothing to learn: declarations do not change."""
