"""What a plan is believed to bring: the rate of every job that it moves, and whose rates only compare places."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence

from carpool.core.estimates import Estimator, KnowsScale
from carpool.core.messages import Change
from carpool.core.model import Job, JobId
from carpool.core.occupancy import Occupancy
from carpool.core.policy import placement_of


def rates_of(
    changes: Sequence[Change], jobs: dict[JobId, Job], occupancy: Occupancy, estimator: Estimator
) -> tuple[float, ...]:
    """The rate of each changed job, in order, once all changes hold; 0 for one that leaves."""
    after: Mapping[JobId, Job] = jobs
    if occupancy.is_shared:  # those who start together are neighbours of each other already
        after = ChainMap({job: jobs[job]._replace(desired=held) for job, held, _ in changes}, jobs)
    rates = []
    for name, held, _ in changes:
        rate = 0.0
        if held is not None:
            placement = placement_of(occupancy, after, jobs[name], held, sharing=occupancy.is_shared)
            rate = estimator.rate(jobs[name].spec, placement).mean
        rates.append(rate)
    return tuple(rates)


def guesses_of(changes: Sequence[Change], jobs: Mapping[JobId, Job], estimator: Estimator) -> tuple[JobId, ...]:
    """Jobs that start though nobody knows how fast they are."""
    if not changes or not isinstance(estimator, KnowsScale):
        return ()
    return tuple([job for job, held, _ in changes if held is not None and not estimator.knows_scale(jobs[job].spec)])
