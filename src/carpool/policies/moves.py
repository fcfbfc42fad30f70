"""What an estimator may know beyond rates: how long a job stands still when it starts, moves or is resized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from carpool.core.estimates import Estimator
from carpool.core.model import Job, JobSpec


@runtime_checkable
class KnowsMoves(Protocol):
    """An estimator that can also tell what a move costs."""

    def move_s(self, spec: JobSpec) -> float | None:
        """Seconds of standstill for every change of devices; None while nothing is known of them."""
        ...


def moves_s(estimates: Estimator, jobs: Sequence[Job], otherwise: float) -> NDArray[np.float64]:
    """What the estimator says of the moves of each job that holds something, else a guess."""
    if not isinstance(estimates, KnowsMoves):
        return np.full(len(jobs), otherwise)
    told = [None if job.desired is None else estimates.move_s(job.spec) for job in jobs]
    return np.array([otherwise if seconds is None else seconds for seconds in told])
