"""Reconciliation of desired and observed state: which facts are current, which orders to send again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from carpool.core.messages import RUN, Assign, Order, Planned, Probe, Release
from carpool.core.model import Job, JobId, Phase


def is_current(job: Job, generation: int) -> bool:
    """Whether a fact of that generation counts: not older than the applied one, not newer than the last order."""
    return job.applied <= generation <= job.generation


def orders_to_close(jobs: Iterable[Job]) -> list[Order]:
    """Repeated orders for every job whose observed state is not the desired one.

    Used after a restart; orders are idempotent, since they describe a desired state.
    """
    return [order_for(job) for job in sorted(jobs, key=lambda job: job.seq) if job.applied < job.generation]


def order_for(job: Job) -> Order:
    """The newest order about a job."""
    if job.desired is None:
        return Release(job.id, job.generation)
    return Assign(job.id, job.desired, job.generation, Probe(job.probe_steps) if job.probe_steps else RUN)


def without_unknown(planned: Planned, jobs: Mapping[JobId, Job], num_devices: int) -> Planned:
    """A plan without changes of unknown jobs and devices."""
    known = [
        (change, rate)
        for change, rate in zip(planned.changes, planned.believed, strict=True)
        if change.job in jobs
        and jobs[change.job].phase in (Phase.WAITING, Phase.RUNNING)
        and (change.allocation is None or max(change.allocation.devices()) < num_devices)
        and (change.allocation is not None or jobs[change.job].desired is not None)
    ]
    changes, believed = tuple(change for change, _ in known), tuple(rate for _, rate in known)
    return planned._replace(changes=changes, believed=believed)
