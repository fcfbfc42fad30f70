"""Allocation history: which job held which device when, from journal records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.lifecycle import requires_release
from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    LimitsChanged,
    NodeLost,
    Record,
)
from carpool.core.model import Allocation, Job, JobId
from carpool.core.topology import Cluster

_KEPT = 50_000  # spans that are over

_LEAVES = (JobCancelled, JobCrashed, JobFailed, JobFinished, JobPaused)


class AllocationSpan(NamedTuple):
    """A job held a share of a device for a while."""

    device: int
    job: JobId
    fraction: float
    since: float
    until: float | None = None


class AllocationHistory:
    """An observer of the scheduler with the newest spans of every device."""

    def __init__(self, cluster: Cluster, kept: int = _KEPT) -> None:
        self.cluster = cluster  # grows with the scheduler's
        self._over: deque[AllocationSpan] = deque(maxlen=kept)
        self._open: dict[JobId, tuple[float, Allocation]] = {}

    def record(self, record: Record) -> None:
        """Take in one record."""
        for fact in record.facts:
            self._take(record.at, fact)
        if record.planned is not None:
            for change in record.planned.changes:
                self._hold(record.at, change.job, change.allocation)

    def adopt(self, job: Job, begins_at: float) -> None:
        """Show what a job holds since before the first record, once no more records are to come from the past."""
        if job.desired is not None and job.id not in self._open:
            self._open[job.id] = (max(job.since, begins_at), job.desired)

    def between(self, since: float, until: float) -> Iterator[AllocationSpan]:
        """Spans that touch a stretch of time: those that are over in order of their ends, then those that are not."""
        for span in self._over:
            if span.until is not None and span.until >= since and span.since <= until:
                yield span
        for job, (began, allocation) in self._open.items():
            if began <= until:
                yield from _spans(job, allocation, began, None)

    def _take(self, at: float, fact: Fact) -> None:
        if isinstance(fact, _LEAVES) or (isinstance(fact, LimitsChanged) and self._is_taken_off(fact)):
            self._hold(at, fact.job, None)
        elif isinstance(fact, NodeLost) and fact.node < len(self.cluster.nodes):
            lost = set(self.cluster.nodes[fact.node].devices)
            for job, (_, allocation) in list(self._open.items()):
                if not lost.isdisjoint(allocation.devices()):
                    self._hold(at, job, None)

    def _is_taken_off(self, fact: LimitsChanged) -> bool:
        return fact.job in self._open and requires_release(fact, self._open[fact.job][1])

    def _hold(self, at: float, job: JobId, allocation: Allocation | None) -> None:
        before = self._open.pop(job, None)
        if before is not None and at > before[0]:
            self._over.extend(_spans(job, before[1], before[0], at))
        if allocation is not None:
            self._open[job] = (at, allocation)


def _spans(job: JobId, allocation: Allocation, since: float, until: float | None) -> Iterator[AllocationSpan]:
    for share in allocation.shares:
        for device in share.devices:
            yield AllocationSpan(device, job, share.fraction, since, until)
