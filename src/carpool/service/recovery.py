"""What a store says when it is opened: everything that follows records is brought to where it stood."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

from carpool.backends.ledger import Ledger
from carpool.backends.lessons import Lessons
from carpool.backends.live import Live
from carpool.core.messages import PolicyChanged, Record
from carpool.core.model import JobId
from carpool.core.scheduler import Scheduler
from carpool.runtime.program import Program
from carpool.runtime.reports import Report
from carpool.runtime.wire import report_from_json
from carpool.service.chronicle import Chronicle
from carpool.service.spans import Spans
from carpool.service.store import Details, Store


class Followers(NamedTuple):
    """Who follows a scheduler record by record, and what an executor reports besides."""

    ledger: Ledger
    live: Live
    spans: Spans
    chronicle: Chronicle
    lessons: Lessons  # are learned from what happens now, not again from the past

    def record(self, record: Record) -> None:
        """Take in one record."""
        for each in (self.ledger, self.live, self.spans, self.chronicle):
            each.record(record)

    def take(self, at: float, report: Report) -> None:
        """Take in a report."""
        self.ledger.take(at, report)
        self.live.take(report)
        self.lessons.take(report)


class Recovered(NamedTuple):
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
        scheduler.reopen(store.balance.balance)
        after = store.balance.number
    records = [entry.record for entry in store.entries(after)]
    scheduler.recover(records, has_gaps=bool(store.findings.lost))
    return len(records)


def recover_followers(store: Store, scheduler: Scheduler, followers: Followers, folded: int = 0) -> Recovered:
    """Show followers all that is kept; jobs that are older than that are known from the balance."""
    found = Recovered({}, {}, folded)
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


def _take_details(found: Recovered, details: Details) -> None:
    for job, detail in details.items():
        found.programs[JobId(job)] = Program.from_json(detail["program"])
        if "note" in detail:
            found.notes[JobId(job)] = detail["note"]
