"""What an estimator may know beyond rates: how long a job stands still when it starts, moves or is resized."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec


@runtime_checkable
class KnowsMoves(Protocol):
    """An estimator that can also tell what a move costs."""

    def move_s(self, spec: JobSpec) -> float:
        """Seconds of standstill for every change of devices."""
        ...


def move_s(estimates: Estimator, spec: JobSpec, otherwise: float) -> float:
    """What the estimator says of a job's moves, else a guess."""
    return estimates.move_s(spec) if isinstance(estimates, KnowsMoves) else otherwise
