"""Crash recovery: rebuilds scheduler and observers from the store, and reconciles them with the executor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.backends.profile_learner import ProfileLearner
from carpool.core.journal import SkippedItem, skipped_item
from carpool.core.messages import Fact, JobFailed, Observer, Order, PolicyChanged, Record
from carpool.core.model import Job, JobId
from carpool.core.scheduler import Scheduler
from carpool.core.state.reconcile import order_for
from carpool.jobs.program import Program
from carpool.runtime.executor.client_protocol import HeldJobStatus, report_from_json
from carpool.runtime.executor.reports import Report
from carpool.service.daemon.halving_control import HalvingControl
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventLog
from carpool.service.store.store import Details, Store

_NAMED = 20  # skipped values that the messages of a start name


class ResyncActions(NamedTuple):
    """Messages to claimed executors; repeated ones have no effect."""

    holders: Mapping[JobId, str]  # the executor that has the newest state of each job that one holds
    orders: tuple[Order, ...]
    forget: tuple[tuple[str, JobId], ...]  # jobs that are over in the journal, or that another executor holds


def reconcile(jobs: Mapping[JobId, Job], held: Mapping[str, Mapping[JobId, HeldJobStatus]]) -> ResyncActions:
    """Orders that executors may have missed: orders are committed before they are sent, so they can only be behind.

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
    halving: HalvingControl

    def record(self, record: Record) -> None:
        for each in (self.accounting, self.estimator, self.allocations, self.events, self.halving):
            each.record(record)

    def take(self, at: float, report: Report) -> None:
        self.accounting.take(at, report)
        self.estimator.take(report)
        self.learner.take(report)
        self.halving.take(report)


class RecoveredState(NamedTuple):
    """The content of a store beside the scheduler's state."""

    programs: dict[JobId, Program]  # of all jobs in its records
    notes: dict[JobId, Mapping[str, Any]]  # that callers submitted with them
    folded: int  # records after the newest snapshot


class Salvage:
    """The parts of a journal that recovery could not use, by job; the daemon starts without them."""

    def __init__(self) -> None:
        self.reasons: dict[JobId, str] = {}  # the first of each job
        self._places: list[str] = []

    def add(self, where: str, items: Sequence[SkippedItem]) -> None:
        for job, reason in items:
            self.reasons.setdefault(job, f"{where} cannot be used: {reason}")
            self._places.append(f"{where}, {f'job {job!r}' if job else 'no known job'}: {reason}")

    @contextmanager
    def tolerating(self, where: str, job: str = "") -> Iterator[None]:
        """Skip anything that raises: no content of a journal may keep the daemon from starting."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            self.add(where, [skipped_item(job, error)])

    def messages(self) -> list[str]:
        shown, more = self._places[:_NAMED], len(self._places) - _NAMED
        found = [f"A value of the journal cannot be used and was skipped: {place}" for place in shown]
        return [*found, f"{more} more values of the journal were skipped."] if more > 0 else found

    def failures(self, jobs: Mapping[JobId, Job]) -> list[Fact]:
        """Fail the jobs that are not over: what the journal says about them is incomplete."""
        return [JobFailed(job, jobs[job].generation, reason) for job, reason in self.reasons.items() if job in jobs]


def newest_policy(store: Store) -> str:
    """The last policy in the journal, as it was written."""
    snapshot = store.snapshot
    text = store.header.policy if snapshot is None else snapshot.state.policy or store.header.policy
    for entry in store.entries(0 if snapshot is None else snapshot.number):
        for fact in entry.record.facts:
            text = fact.policy if isinstance(fact, PolicyChanged) else text
    return text


def recover_scheduler(store: Store, scheduler: Scheduler, salvage: Salvage | None = None) -> int:
    """Fold the newest snapshot and the records after it, without planning again. Returns how many they are."""
    salvage = salvage or Salvage()
    after = 0
    if store.snapshot is not None:
        salvage.add("a snapshot", store.snapshot.skipped)
        scheduler.restore(store.snapshot.state)
        after = store.snapshot.number
    folded = 0
    skipped: list[SkippedItem] = []

    def records() -> Iterator[Record]:
        nonlocal folded
        for entry in store.entries(after):
            folded += 1
            skipped.extend(entry.skipped)
            yield entry.record
            salvage.add(f"record {entry.number}", skipped)  # including those that folding it added
            skipped.clear()

    scheduler.recover(records(), has_gaps=bool(store.findings.lost), skipped=skipped)
    return folded


def recover_observers(
    store: Store,
    scheduler: Scheduler,
    observers: StateObservers,
    folded: int = 0,
    others: Sequence[Observer] = (),
    salvage: Salvage | None = None,
) -> RecoveredState:
    """Show observers all stored records; older jobs are taken from the snapshot."""
    salvage = salvage or Salvage()
    found = RecoveredState({}, {}, folded)
    begins_at = next(store.records(), Record(inf, ())).at
    if store.snapshot is not None:
        _take_details(found, store.snapshot.details, salvage)
        for job in store.snapshot.state.jobs:
            observers.accounting.adopt(job, begins_at)
            observers.events.adopt(job)
            observers.halving.adopt(job)
        for name, detail in store.snapshot.details.items():
            with salvage.tolerating("a snapshot", name):
                if "sized" in detail:
                    observers.take(store.snapshot.state.at, report_from_json(dict(detail["sized"])))
    for entry in store.entries():
        where = f"record {entry.number}"
        for stored in entry.reports:
            with salvage.tolerating(where, str(stored.report.get("job", ""))):
                observers.take(stored.at, report_from_json(dict(stored.report)))
        for observer in (observers, *others):
            with salvage.tolerating(where, _first_job(entry.record)):
                observer.record(entry.record)
        _take_details(found, entry.details, salvage)
    for job in scheduler.jobs.values():
        observers.allocations.adopt(job, min(begins_at, scheduler.at))
    observers.halving.end_replay()
    return found


def _first_job(record: Record) -> str:
    return next((str(fact.job) for fact in record.facts if hasattr(fact, "job")), "")


def _take_details(found: RecoveredState, details: Details, salvage: Salvage) -> None:
    for job, detail in details.items():
        with salvage.tolerating("the program", job):
            found.programs[JobId(job)] = Program.from_json(detail["program"])
            if "note" in detail:
                found.notes[JobId(job)] = detail["note"]
