"""Somebody who believes exactly what is true in a world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from carpool.core.estimates import Estimate
from carpool.core.messages import ProgressReported
from carpool.core.model import Job, JobSpec
from carpool.core.topology import Placement


class HasRate(Protocol):
    """A world in which a job's rate hangs only on where it runs."""

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Units of work per second there."""
        ...


W_co = TypeVar("W_co", bound=HasRate, covariant=True)


@dataclass(frozen=True, slots=True)
class Oracle(Generic[W_co]):
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
