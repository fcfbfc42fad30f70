"""Moving the jobs that a plan changes on the device map, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from carpool.core.messages import Change
from carpool.core.model import Job, JobId
from carpool.core.occupancy import Occupancy


def move(occupancy: Occupancy, jobs: Mapping[JobId, Job], changes: Sequence[Change], most: float) -> None:
    """Let all leave first, so that jobs may swap places; fractions on a device sum to `most` at most.

    Overbooked, with nothing changed, where there is no room; so it is with what a change that is none may raise.
    """
    for change in changes:
        held = jobs[change.job].desired
        if held is not None:
            occupancy.give(change.job, held)
    for index, change in enumerate(changes):
        if change.allocation is None:
            continue
        try:
            occupancy.take(jobs[change.job].spec, change.allocation, most)
        except Exception:
            _move_back(occupancy, jobs, changes, index)
            raise


def _move_back(occupancy: Occupancy, jobs: Mapping[JobId, Job], changes: Sequence[Change], taken: int) -> None:
    for change in changes[:taken]:
        if change.allocation is not None:
            occupancy.give(change.job, change.allocation)
    for change in changes:
        job = jobs[change.job]
        if job.desired is not None:
            occupancy.take(job.spec, job.desired, inf)  # it was allowed then
