"""Crash recovery: rebuilds scheduler and observers from the store, and reconciles them with the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.core.messages import Observer, Order, PolicyChanged, Record
from carpool.core.model import Job, JobId
from carpool.core.scheduler import Scheduler
from carpool.core.state.reconcile import order_for
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import HeldJobStatus, report_from_json
from carpool.runtime.executor.reports import Report
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventLog
from carpool.service.store.store import Details, Store


class ResyncActions(NamedTuple):
    """What claimed executors are sent; what they had before changes nothing."""

    holders: Mapping[JobId, str]  # the executor that has the newest state of each job that one holds
    orders: tuple[Order, ...]
    forget: tuple[tuple[str, JobId], ...]  # over in the journal, or of a job that another executor holds


def reconcile(jobs: Mapping[JobId, Job], held: Mapping[str, Mapping[JobId, HeldJobStatus]]) -> ResyncActions:
    """What executors may lack: orders are committed before they are sent, so they lag the journal, never the reverse.

    Orders keep their generation. Of several executors that hold a job, the one with the newest order has its state.
    """
    newest: dict[JobId, tuple[int, int, str]] = {}
    for name, statuses in held.items():
        for job, status in statuses.items():
            newest[job] = max(newest.get(job, (0, 0, "")), (status.generation, status.steps, name))
    listed = sorted(jobs.values(), key=lambda job: job.seq)
    return ResyncActions(
        holders={job: newest[job][2] for job in newest if job in jobs},
        orders=tuple(order_for(job) for job in listed if job.generation > newest.get(job.id, (0,))[0]),
        forget=tuple(
            (name, job)
            for name, statuses in held.items()
            for job in sorted(statuses)
            if job not in jobs or newest[job][2] != name
        ),
    )


def is_ahead(jobs: Mapping[JobId, Job], held: Mapping[JobId, HeldJobStatus]) -> bool:
    """Whether an executor has orders that the journal does not hold: then records were lost."""
    return any(held[job].generation > jobs[job].generation for job in jobs if job in held)


class StateObservers(NamedTuple):
    """Observers of the scheduler's records and of the executor's reports."""

    accounting: JobAccounting
    estimator: OnlineEstimator
    allocations: AllocationHistory
    events: EventLog
    learner: ProfileLearner  # follows new records only

    def record(self, record: Record) -> None:
        for each in (self.accounting, self.estimator, self.allocations, self.events):
            each.record(record)

    def take(self, at: float, report: Report) -> None:
        self.accounting.take(at, report)
        self.estimator.take(report)
        self.learner.take(report)


class RecoveredState(NamedTuple):
    """What the store holds beside the scheduler's state."""

    programs: dict[JobId, Program]  # of all jobs in its records
    notes: dict[JobId, Mapping[str, Any]]  # that callers submitted with them
    folded: int  # records behind the newest snapshot


def newest_policy(store: Store) -> str:
    """The last policy in the journal, as it was written."""
    snapshot = store.snapshot
    text = store.header.policy if snapshot is None else snapshot.state.policy or store.header.policy
    for entry in store.entries(0 if snapshot is None else snapshot.number):
        for fact in entry.record.facts:
            text = fact.policy if isinstance(fact, PolicyChanged) else text
    return text


def recover_scheduler(store: Store, scheduler: Scheduler) -> int:
    """Fold the newest snapshot and the records behind it, without planning again; the number of these records."""
    after = 0
    if store.snapshot is not None:
        scheduler.restore(store.snapshot.state)
        after = store.snapshot.number
    records = [entry.record for entry in store.entries(after)]
    scheduler.recover(records, has_gaps=bool(store.findings.lost))
    return len(records)


def recover_observers(
    store: Store, scheduler: Scheduler, observers: StateObservers, folded: int = 0, others: Sequence[Observer] = ()
) -> RecoveredState:
    """Show observers all stored records; older jobs are taken from the snapshot."""
    found = RecoveredState({}, {}, folded)
    begins_at = next(store.records(), Record(inf, ())).at
    if store.snapshot is not None:
        _take_details(found, store.snapshot.details)
        for job in store.snapshot.state.jobs:
            observers.accounting.adopt(job, begins_at)
            observers.events.adopt(job)
        for detail in store.snapshot.details.values():
            if "sized" in detail:
                observers.take(store.snapshot.state.at, report_from_json(dict(detail["sized"])))
    for entry in store.entries():
        for stored in entry.reports:
            observers.take(stored.at, report_from_json(dict(stored.report)))
        for observer in (observers, *others):
            observer.record(entry.record)
        _take_details(found, entry.details)
    for job in scheduler.jobs.values():
        observers.allocations.adopt(job, min(begins_at, scheduler.at))
    return found


def _take_details(found: RecoveredState, details: Details) -> None:
    for job, detail in details.items():
        found.programs[JobId(job)] = Program.from_json(detail["program"])
        if "note" in detail:
            found.notes[JobId(job)] = detail["note"]
