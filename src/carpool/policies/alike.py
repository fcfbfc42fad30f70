"""What an estimator may know beyond rates: of which jobs it would say the same, so that it is asked once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, runtime_checkable

from carpool.core.estimates import Estimator
from carpool.core.model import JobSpec


@runtime_checkable
class KnowsAlike(Protocol):
    """An estimator that can tell which jobs it takes to be alike."""

    def alike(self, spec: JobSpec) -> Hashable:
        """What its answers about a job by itself depend on: rates in any place without neighbours, memory, batches.

        Two jobs with equal answers, or one job with equal answers at two times, are believed to be equally fast
        everywhere, as long as they ask for equally many devices. Asking is quick.
        """
        ...


def likenesses(estimates: Estimator, specs: list[JobSpec]) -> list[Hashable]:
    """What the estimator's answers depend on for each job; the job itself where it does not say."""
    if isinstance(estimates, KnowsAlike):
        alike = estimates.alike
        return [alike(spec) for spec in specs]
    return [spec.id for spec in specs]
