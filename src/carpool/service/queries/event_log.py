"""Event log: numbered events for subscribers, and the newest decisions, from records and reports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from carpool.runtime.executor.reports import Evaluation, Report, Told

_EVENTS_KEPT = 4096  # events that somebody who was away for a moment can still be told
_PER_EPOCH = 10**9  # more than ever happen between two starts; epochs stay below 2**53 / 10**9, nine million


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: to a job, or to the daemon where no job is named."""

    number: int
    at: float
    kind: str  # submitted, phase, changed, progress, decision, told, evaluated, device, policy, missed
    job: str = ""
    owner: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class EventFeed:
    """The newest events; listeners are woken together and read on by themselves, so a slow one holds nobody up.

    One who falls behind by more than is kept is told ``missed`` and goes on with what there is. So is one who has a
    number of an earlier start: each start counts its events from its own `epoch` on, and goes on with what has happened
    since `begin`.
    """

    def __init__(self, epoch: int = 0, kept: int = _EVENTS_KEPT) -> None:
        self._first = self._next = self._begun = epoch * _PER_EPOCH + 1
        self._events: deque[Event] = deque(maxlen=kept)
        self._news = asyncio.Event()
        self._closed = False
        self.listeners = 0

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._next - 1

    @property
    def count(self) -> int:
        """Events so far."""
        return self._next - self._first

    @property
    def _oldest(self) -> int:
        return self._next - len(self._events)

    def begin(self) -> None:
        """What was added until now had happened before this start."""
        self._begun = self._next

    def add(self, at: float, kind: str, job: str = "", owner: str = "", **data: Any) -> None:
        """Something happened."""
        self._events.append(Event(self._next, at, kind, job, owner, data))
        self._next += 1
        self._wake()

    def close(self) -> None:
        """Nothing more will happen: listeners come to their end."""
        self._closed = True
        self._wake()

    async def listen(self, after: int | None = None) -> AsyncIterator[Event]:
        """Events behind a number, 0 for all, then those to come; from now on where no number is given."""
        async with aclosing(self.batches(after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """The same, as many at once as there are: whoever reads slowly is woken seldom."""
        seen = self.last if after is None else after or self._first - 1
        self.listeners += 1
        try:
            if not self._first - 1 <= seen <= self.last:
                seen = self._begun - 1
                if seen + 1 >= self._oldest:  # else they are told below
                    yield [self._missed(seen)]
            while True:
                news = self._news
                if batch := self._behind(seen):
                    seen = batch[-1].number
                    yield batch
                elif self._closed:
                    return
                else:
                    await news.wait()
        finally:
            self.listeners -= 1

    def _behind(self, seen: int) -> list[Event]:
        """Events behind a number, a copy; ``missed`` in the place of those that are not kept any more."""
        missing = self._next - 1 - seen
        if missing <= 0:
            return []
        if seen + 1 >= self._oldest:
            return list(self._events)[-missing:]
        return [self._missed(self._oldest - 1), *self._events]

    def _missed(self, number: int) -> Event:
        return Event(number, self._events[0].at if self._events else 0.0, "missed")

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


_DECISIONS_KEPT = 2000  # decisions

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


class EventLog:
    """An observer of the scheduler and of reports: what listeners of the feed are told, and the newest decisions."""

    def __init__(self, feed: EventFeed, unix: Callable[[float], float] = float) -> None:
        self.feed = feed
        self.decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)
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
