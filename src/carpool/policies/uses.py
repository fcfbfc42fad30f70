"""What an estimator may know beyond rates: how much of a device a job keeps busy, and how much memory it needs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from carpool.core.estimates import Estimator, Use
from carpool.core.model import JobSpec, Kind


@runtime_checkable
class KnowsUse(Protocol):
    """An estimator that can also tell what a job uses of a device."""

    def use(self, spec: JobSpec, kind: Kind) -> Use:
        """Shares kept busy on a device of that kind, at the job's own batch size."""
        ...


@runtime_checkable
class KnowsMemory(Protocol):
    """An estimator that can also tell how much memory a job needs."""

    def memory(self, spec: JobSpec) -> int:
        """Bytes on each of its devices at its own batch size; 0: unknown."""
        ...


def memory_of(estimates: Estimator, spec: JobSpec) -> int:
    """What a job declares, else what the estimator believes; 0: unknown."""
    if spec.memory_bytes or not isinstance(estimates, KnowsMemory):
        return spec.memory_bytes
    return estimates.memory(spec)
