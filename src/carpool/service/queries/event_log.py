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

_MAX_EVENTS = 4096
_MAX_DECISIONS = 2000
_PER_EPOCH = 10**9  # event numbers of one daemon start; epoch * _PER_EPOCH stays below 2**53 for nine million starts

_PhaseFact = JobFinished | JobFailed | JobCancelled | JobCrashed | JobPaused | JobResumed
_PHASES: dict[type[_PhaseFact], str] = {
    JobFinished: "finished",
    JobFailed: "failed",
    JobCancelled: "cancelled",
    JobCrashed: "waiting",
    JobPaused: "paused",
    JobResumed: "waiting",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job, or of the daemon when `job` is empty."""

    number: int
    at: float
    kind: str  # submitted, phase, changed, progress, decision, told, evaluated, device, policy, late, missed
    job: str = ""
    owner: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class EventFeed:
    """Buffers the newest events; each listener reads at its own pace, so a slow one delays no other.

    A listener that falls behind by more than the buffer gets a ``missed`` event and continues with the oldest
    buffered one. Every start of the daemon numbers its events from its own `epoch`; a listener that reconnects with a
    number of an earlier start gets ``missed`` and continues with the events since `end_replay`.
    """

    def __init__(self, epoch: int = 0, max_events: int = _MAX_EVENTS) -> None:
        self._first = self._next = self._first_live = epoch * _PER_EPOCH + 1
        self._events: deque[Event] = deque(maxlen=max_events)
        self._changed = asyncio.Event()
        self._closed = False
        self.listeners = 0

    @property
    def last(self) -> int:
        return self._next - 1

    @property
    def count(self) -> int:
        return self._next - self._first

    @property
    def _oldest(self) -> int:
        return self._next - len(self._events)

    def end_replay(self) -> None:
        """Mark all events so far as replayed: they happened before this start."""
        self._first_live = self._next

    def add(self, at: float, kind: str, job: str = "", owner: str = "", **data: Any) -> None:
        self._events.append(Event(self._next, at, kind, job, owner, data))
        self._next += 1
        self._wake()

    def close(self) -> None:
        """End all listeners once they have read the remaining events."""
        self._closed = True
        self._wake()

    async def listen(self, after: int | None = None) -> AsyncIterator[Event]:
        """Yield events with a number above `after` and then new ones; only new ones when `after` is None."""
        async with aclosing(self.batches(after)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(self, after: int | None = None) -> AsyncGenerator[list[Event], None]:
        """Like `listen`, but yield all available events at once, so that a slow reader is woken rarely."""
        seen = self.last if after is None else after or self._first - 1
        self.listeners += 1
        try:
            if not self._first - 1 <= seen <= self.last:
                seen = self._first_live - 1
                if seen + 1 >= self._oldest:  # otherwise _after adds the missed event
                    yield [self._missed(seen)]
            while True:
                changed = self._changed
                if batch := self._after(seen):
                    seen = batch[-1].number
                    yield batch
                elif self._closed:
                    return
                else:
                    await changed.wait()
        finally:
            self.listeners -= 1

    def _after(self, seen: int) -> list[Event]:
        """Copy the events with a number above `seen`; begins with ``missed`` when some are no longer buffered."""
        missing = self._next - 1 - seen
        if missing <= 0:
            return []
        if seen + 1 >= self._oldest:
            return list(self._events)[-missing:]
        return [self._missed(self._oldest - 1), *self._events]

    def _missed(self, number: int) -> Event:
        return Event(number, self._events[0].at if self._events else 0.0, "missed")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Decision(NamedTuple):
    """A plan that changed at least one allocation."""

    number: int
    at: float
    planned: Planned


class EventLog:
    """Publishes records and executor reports as events to the feed, and keeps the newest decisions."""

    def __init__(self, feed: EventFeed, unix: Callable[[float], float] = float) -> None:
        self.feed = feed
        self.decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)
        self.num_decisions = 0
        self._unix = unix
        self._owners: dict[JobId, str] = {}  # of active jobs

    def record(self, record: Record) -> None:
        at = self._unix(record.at)
        for fact in record.facts:
            self._on_fact(at, fact)
        planned = record.planned
        if planned is None or not planned.changes:
            return
        self.num_decisions += 1
        self.decisions.append(Decision(self.num_decisions, record.at, planned))
        self.feed.add(at, "decision", number=self.num_decisions, reason=planned.reason, changes=len(planned.changes))
        for change in planned.changes:
            phase = "waiting" if change.allocation is None else "running"
            self._publish(at, "phase", change.job, phase=phase)

    def adopt(self, job: Job) -> None:
        """Register the owner of a job whose submission may be older than the replayed records."""
        self._owners[job.id] = job.spec.user

    def on_report(self, at: float, report: Report) -> None:
        match report:
            case Told(job=job, words=words):
                self._publish(self._unix(at), "told", job, words=words)
            case Evaluation(job=job, step=step, metrics=metrics):
                self._publish(self._unix(at), "evaluated", job, step=step, metrics=dict(metrics))

    def _on_fact(self, at: float, fact: Fact) -> None:
        if isinstance(fact, _PhaseFact):
            self._publish(at, "phase", fact.job, phase=_PHASES[type(fact)])
            if isinstance(fact, JobFinished | JobFailed | JobCancelled):
                self._owners.pop(fact.job, None)
            return
        match fact:
            case JobSubmitted(spec=spec):
                self._owners[spec.id] = spec.user
                self._publish(at, "submitted", spec.id)
            case ProgressReported(job=job, done=done, rate=rate, loss=loss):
                self._publish(at, "progress", job, steps=done, steps_per_s=rate, loss=loss)
            case DeadlineMissed(job=job):
                self._publish(at, "late", job)
            case WeightChanged(job=job, weight=weight):
                self._publish(at, "changed", job, weight=weight)
            case LimitsChanged(job=job, min_devices=least, max_devices=most):
                self._publish(at, "changed", job, min_devices=least, max_devices=most)
            case PolicyChanged(policy=policy):
                self.feed.add(at, "policy", policy=policy)
            case NodeJoined(name=name):
                self.feed.add(at, "device", joined=name)
            case NodeLost(node=node):
                self.feed.add(at, "device", lost=int(node))
            case OutsidersSeen(device=device, processes=processes):
                self.feed.add(at, "device", device=int(device), outsiders=len(processes))

    def _publish(self, at: float, kind: str, job: JobId, **data: object) -> None:
        self.feed.add(at, kind, job, self._owners.get(job, ""), **data)
