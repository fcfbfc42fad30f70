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

_MAX_CLOSED = 50_000  # spans

_RELEASES = (JobCancelled, JobCrashed, JobFailed, JobFinished, JobPaused)


class AllocationSpan(NamedTuple):
    """A job held a share of a device; `until` is None while it still does."""

    device: int
    job: JobId
    fraction: float
    since: float
    until: float | None = None


class AllocationHistory:
    """Observes the scheduler and keeps the newest spans of every device."""

    def __init__(self, cluster: Cluster, max_closed: int = _MAX_CLOSED) -> None:
        self.cluster = cluster  # replaced when the scheduler's grows
        self._closed: deque[AllocationSpan] = deque(maxlen=max_closed)
        self._open: dict[JobId, tuple[float, Allocation]] = {}

    def record(self, record: Record) -> None:
        for fact in record.facts:
            self._on_fact(record.at, fact)
        if record.planned is not None:
            for change in record.planned.changes:
                self._set(record.at, change.job, change.allocation)

    def adopt(self, job: Job, begins_at: float) -> None:
        """Open the span of a job that held its devices before the first replayed record."""
        if job.desired is not None and job.id not in self._open:
            self._open[job.id] = (max(job.since, begins_at), job.desired)

    def between(self, since: float, until: float) -> Iterator[AllocationSpan]:
        """Spans that overlap an interval: closed ones by end time, then open ones."""
        for span in self._closed:
            if span.until is not None and span.until >= since and span.since <= until:
                yield span
        for job, (start, allocation) in self._open.items():
            if start <= until:
                yield from _spans(job, allocation, start, None)

    def _on_fact(self, at: float, fact: Fact) -> None:
        if isinstance(fact, _RELEASES) or (isinstance(fact, LimitsChanged) and self._is_released_by(fact)):
            self._set(at, fact.job, None)
        elif isinstance(fact, NodeLost) and fact.node < len(self.cluster.nodes):
            lost = set(self.cluster.nodes[fact.node].devices)
            for job, (_, allocation) in list(self._open.items()):
                if not lost.isdisjoint(allocation.devices()):
                    self._set(at, job, None)

    def _is_released_by(self, fact: LimitsChanged) -> bool:
        return fact.job in self._open and requires_release(fact, self._open[fact.job][1])

    def _set(self, at: float, job: JobId, allocation: Allocation | None) -> None:
        before = self._open.pop(job, None)
        if before is not None and at > before[0]:
            self._closed.extend(_spans(job, before[1], before[0], at))
        if allocation is not None:
            self._open[job] = (at, allocation)


def _spans(job: JobId, allocation: Allocation, since: float, until: float | None) -> Iterator[AllocationSpan]:
    for share in allocation.shares:
        for device in share.devices:
            yield AllocationSpan(device, job, share.fraction, since, until)
