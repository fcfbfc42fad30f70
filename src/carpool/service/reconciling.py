"""A daemon's books against an executor that has gone on without it: what must be said again; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from carpool.core.messages import Order
from carpool.core.model import Job, JobId
from carpool.core.reconcile import order_for
from carpool.runtime.inventory import Standing


class Again(NamedTuple):
    """What an executor is told when it was claimed; all of it may have been said before, and then changes nothing."""

    introduce: tuple[JobId, ...]  # to go on from what is on disk
    orders: tuple[Order, ...]
    forget: tuple[JobId, ...]  # over in the books, whatever the executor still has of them


def reconcile(jobs: Mapping[JobId, Job], standings: Mapping[JobId, Standing]) -> Again:
    """Orders were committed before they were carried, so books are never behind: the executor may be.

    A job that it should have heard of and does not know is introduced. An order it has not heard of is given again,
    under its old generation.
    """
    listed = sorted(jobs.values(), key=lambda job: job.seq)
    behind = [job for job in listed if job.generation > (standings[job.id].generation if job.id in standings else 0)]
    return Again(
        introduce=tuple(job.id for job in behind if job.id not in standings),
        orders=tuple(order_for(job) for job in behind),
        forget=tuple(sorted(job for job in standings if job not in jobs)),
    )


def is_ahead(jobs: Mapping[JobId, Job], standings: Mapping[JobId, Standing]) -> bool:
    """Whether an executor has heard orders that the books do not know: then records were lost."""
    return any(standings[job].generation > jobs[job].generation for job in jobs if job in standings)
