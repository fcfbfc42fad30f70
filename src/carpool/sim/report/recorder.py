"""Observer that fills a recording from the scheduler's records."""

from __future__ import annotations

from typing import NamedTuple

from carpool.core.messages import (
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Record,
)
from carpool.core.model import Allocation, JobId, Phase
from carpool.core.topology import Cluster
from carpool.sim.report.recording import Recording

_ENDINGS: dict[type[Fact], Phase] = {
    JobFinished: Phase.FINISHED,
    JobFailed: Phase.FAILED,
    JobCancelled: Phase.CANCELLED,
}


class _Held(NamedTuple):
    allocation: Allocation
    since: float


class RunRecorder:
    """Observer that records which job held which devices when."""

    def __init__(self, cluster: Cluster) -> None:
        self.recording = Recording(cluster.num_devices)
        self._cluster = cluster
        self._numbers: dict[JobId, int] = {}  # jobs that are not over, by their number in the recording
        self._holding: dict[JobId, _Held] = {}
        self._held_s: dict[JobId, float] = {}
        self._busy = 0.0

    def record(self, record: Record) -> None:
        at = record.at
        for fact in record.facts:
            self._take(at, fact)
        if record.planned is not None:
            for change in record.planned.changes:
                self._hold(at, change.job, change.allocation)
        self.recording.sample(at, len(self._numbers) - len(self._holding), self._busy)

    def close(self, at: float) -> Recording:
        """End the run at `at`: allocations that still hold count up to then."""
        for job in list(self._holding):
            self._hold(at, job, None)
        return self.recording

    def _take(self, at: float, fact: Fact) -> None:
        kind = type(fact)
        if isinstance(fact, JobSubmitted):
            spec = fact.spec
            self._numbers[spec.id] = self.recording.submitted(spec.id, at, spec.devices, spec.weight)
        elif kind in _ENDINGS:
            self._end(at, fact.job, _ENDINGS[kind])  # type: ignore[attr-defined]  # endings name their job
        elif isinstance(fact, JobCrashed):
            self._hold(at, fact.job, None)
            self.recording.mark(at, f"{fact.job} crashed")
        elif isinstance(fact, JobPaused):
            self._hold(at, fact.job, None)
        elif isinstance(fact, NodeLost):
            self._lose(at, fact)
        elif isinstance(fact, NodeJoined):
            self.recording.mark(at, f"{fact.name} joined")

    def _hold(self, at: float, job: JobId, allocation: Allocation | None) -> None:
        held = self._holding.pop(job, None)
        if held is not None:
            self._busy -= held.allocation.num_held
            self._held_s[job] = self._held_s.get(job, 0.0) + at - held.since
            for share in held.allocation.shares:
                run = share.devices
                self.recording.held(self._numbers[job], run.start, run.stop, held.since, at, share.fraction)
        if allocation is not None:
            self._busy += allocation.num_held
            self._holding[job] = _Held(allocation, at)

    def _end(self, at: float, job: JobId, phase: Phase) -> None:
        self._hold(at, job, None)
        self.recording.ended(self._numbers.pop(job), at, self._held_s.pop(job, 0.0), phase)

    def _lose(self, at: float, fact: NodeLost) -> None:
        node = self._cluster.nodes[fact.node]
        gone = set(node.devices)
        for job, held in list(self._holding.items()):
            if not gone.isdisjoint(held.allocation.devices()):
                self._hold(at, job, None)
        self.recording.mark(at, f"{node.name} lost")
