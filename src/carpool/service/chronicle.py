"""The newest decisions of a daemon, and its feed: followed record by record and report by report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from carpool.core.messages import (
    DeadlineMissed,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    LimitsChanged,
    NodeJoined,
    NodeLost,
    OutsidersSeen,
    Planned,
    PolicyChanged,
    ProgressReported,
    Record,
    WeightChanged,
)
from carpool.core.model import Job, JobId
from carpool.runtime.reports import Evaluation, Report, Told
from carpool.service.feed import Feed

_KEPT = 2000  # decisions

_PHASES: dict[type[Fact], str] = {
    JobFinished: "finished",
    JobFailed: "failed",
    JobCancelled: "cancelled",
    JobCrashed: "waiting",
    JobPaused: "paused",
    JobResumed: "waiting",
}


class Decision(NamedTuple):
    """A plan that changed something."""

    number: int
    at: float
    planned: Planned


class Chronicle:
    """An observer of the scheduler and of reports: what listeners of the feed are told, and the newest decisions."""

    def __init__(self, feed: Feed, unix: Callable[[float], float] = float) -> None:
        self.feed = feed
        self.decisions: deque[Decision] = deque(maxlen=_KEPT)
        self._unix = unix
        self._owners: dict[JobId, str] = {}  # of jobs that are not over
        self.count = 0  # decisions

    def record(self, record: Record) -> None:
        """Take in one record."""
        at = self._unix(record.at)
        for fact in record.facts:
            self._take(at, fact)
        planned = record.planned
        if planned is None or not planned.changes:
            return
        self.count += 1
        self.decisions.append(Decision(self.count, record.at, planned))
        self.feed.add(at, "decision", number=self.count, reason=planned.reason, changes=len(planned.changes))
        for change in planned.changes:
            phase = "waiting" if change.allocation is None else "running"
            self._tell(at, "phase", change.job, phase=phase)

    def adopt(self, job: Job) -> None:
        """Know whose a job is before records are shown that may not go back to its submission."""
        self._owners[job.id] = job.spec.user

    def hear(self, at: float, report: Report) -> None:
        """Take in one report."""
        match report:
            case Told(job=job, words=words):
                self._tell(self._unix(at), "told", job, words=words)
            case Evaluation(job=job, step=step, metrics=metrics):
                self._tell(self._unix(at), "evaluated", job, step=step, metrics=dict(metrics))

    def _take(self, at: float, fact: Fact) -> None:
        match fact:
            case JobSubmitted(spec=spec):
                self._owners[spec.id] = spec.user
                self._tell(at, "submitted", spec.id)
            case ProgressReported(job=job, done=done, rate=rate, loss=loss):
                self._tell(at, "progress", job, steps=done, steps_per_s=rate, loss=loss)
            case (
                JobFinished(job=job)
                | JobFailed(job=job)
                | JobCancelled(job=job)
                | JobCrashed(job=job)
                | JobPaused(job=job)
                | JobResumed(job=job)
            ):
                phase = _PHASES[type(fact)]
                self._tell(at, "phase", job, phase=phase)
                if phase in ("finished", "failed", "cancelled"):
                    self._owners.pop(job, None)
            case DeadlineMissed(job=job):
                self._tell(at, "late", job)
            case WeightChanged(job=job, weight=weight):
                self._tell(at, "changed", job, weight=weight)
            case LimitsChanged(job=job, min_devices=least, max_devices=most):
                self._tell(at, "changed", job, min_devices=least, max_devices=most)
            case PolicyChanged(policy=policy):
                self.feed.add(at, "policy", policy=policy)
            case NodeJoined(name=name):
                self.feed.add(at, "device", joined=name)
            case NodeLost(node=node):
                self.feed.add(at, "device", lost=int(node))
            case OutsidersSeen(device=device, processes=processes):
                self.feed.add(at, "device", device=int(device), outsiders=len(processes))

    def _tell(self, at: float, kind: str, job: JobId, **data: object) -> None:
        self.feed.add(at, kind, job, self._owners.get(job, ""), **data)
