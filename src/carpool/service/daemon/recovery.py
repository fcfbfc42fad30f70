"""Crash recovery: rebuilds scheduler and observers from the store and reconciles them with the executor."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.core.messages import Order, PolicyChanged, Record
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
    """What an executor is told when it was claimed; all of it may have been said before, and then changes nothing."""

    introduce: tuple[JobId, ...]  # to go on from what is on disk
    orders: tuple[Order, ...]
    forget: tuple[JobId, ...]  # over in the books, whatever the executor still has of them


def reconcile(jobs: Mapping[JobId, Job], standings: Mapping[JobId, HeldJobStatus]) -> ResyncActions:
    """Orders were committed before they were carried, so books are never behind: the executor may be.

    A job that it should have heard of and does not know is introduced. An order it has not heard of is given again,
    under its old generation.
    """
    listed = sorted(jobs.values(), key=lambda job: job.seq)
    behind = [job for job in listed if job.generation > (standings[job.id].generation if job.id in standings else 0)]
    return ResyncActions(
        introduce=tuple(job.id for job in behind if job.id not in standings),
        orders=tuple(order_for(job) for job in behind),
        forget=tuple(sorted(job for job in standings if job not in jobs)),
    )


def is_ahead(jobs: Mapping[JobId, Job], standings: Mapping[JobId, HeldJobStatus]) -> bool:
    """Whether an executor has heard orders that the books do not know: then records were lost."""
    return any(standings[job].generation > jobs[job].generation for job in jobs if job in standings)


class StateObservers(NamedTuple):
    """Who follows a scheduler record by record, and what an executor reports besides."""

    ledger: JobAccounting
    live: OnlineEstimator
    spans: AllocationHistory
    chronicle: EventLog
    lessons: ProfileLearner  # are learned from what happens now, not again from the past

    def record(self, record: Record) -> None:
        """Take in one record."""
        for each in (self.ledger, self.live, self.spans, self.chronicle):
            each.record(record)

    def take(self, at: float, report: Report) -> None:
        """Take in a report."""
        self.ledger.take(at, report)
        self.live.take(report)
        self.lessons.take(report)


class RecoveredState(NamedTuple):
    """What else the store knows."""

    programs: dict[JobId, Program]  # of all jobs it goes back to
    notes: dict[JobId, Mapping[str, Any]]  # that whoever asked wants kept with them
    folded: int  # records behind the newest balance


def newest_policy(store: Store) -> str:
    """The policy that decided last, as it was written."""
    balance = store.balance
    text = store.header.policy if balance is None else balance.balance.policy or store.header.policy
    for entry in store.entries(0 if balance is None else balance.number):
        for fact in entry.record.facts:
            text = fact.policy if isinstance(fact, PolicyChanged) else text
    return text


def recover_scheduler(store: Store, scheduler: Scheduler) -> int:
    """Bring a scheduler to where the newest balance and the records behind it stand; how many these were.

    Nothing is decided again.
    """
    after = 0
    if store.balance is not None:
        scheduler.restore(store.balance.balance)
        after = store.balance.number
    records = [entry.record for entry in store.entries(after)]
    scheduler.recover(records, has_gaps=bool(store.findings.lost))
    return len(records)


def recover_followers(store: Store, scheduler: Scheduler, followers: StateObservers, folded: int = 0) -> RecoveredState:
    """Show followers all that is kept; jobs that are older than that are known from the balance."""
    found = RecoveredState({}, {}, folded)
    begins_at = next(store.records(), Record(inf, ())).at
    if store.balance is not None:
        _take_details(found, store.balance.details)
        for job in store.balance.balance.jobs:
            followers.ledger.adopt(job, begins_at)
            followers.chronicle.adopt(job)
        for detail in store.balance.details.values():
            if "sized" in detail:
                followers.take(store.balance.balance.at, report_from_json(dict(detail["sized"])))
    for entry in store.entries():
        for note in entry.notes:
            followers.take(note.at, report_from_json(dict(note.report)))
        followers.record(entry.record)
        _take_details(found, entry.details)
    for job in scheduler.jobs.values():
        followers.spans.adopt(job, min(begins_at, scheduler.at))
    return found


def _take_details(found: RecoveredState, details: Details) -> None:
    for job, detail in details.items():
        found.programs[JobId(job)] = Program.from_json(detail["program"])
        if "note" in detail:
            found.notes[JobId(job)] = detail["note"]
