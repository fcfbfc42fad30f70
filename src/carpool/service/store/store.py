"""Journal store: records in SQLite and in the accept log, made durable by one commit."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

from carpool.core.journal import Header, header_from_json, header_to_json, record_from_json, record_to_json
from carpool.core.messages import JobSubmitted, Record
from carpool.core.model import JobId
from carpool.core.state.state_snapshot import StateSnapshot, snapshot_from_json, snapshot_to_json
from carpool.service.store.accept_log import AcceptLog, LogLine
from carpool.service.store.database import MIGRATIONS, Database
from carpool.service.store.integrity import IntegrityReport, StoreContents, find_lost_records, read_store

DATABASE = "journal.sqlite"
LOG = "accepted.log"

_BALANCES_KEPT = 2  # the newest, and one in case it is damaged

Details = Mapping[JobId, Mapping[str, Any]]  # what a job is made of besides its spec, as JSON values


class CommitMark(NamedTuple):
    """How far a daemon had come when it wrote a record."""

    epoch: int = 0  # starts of a daemon here, this one included
    life: int = 0  # of the executor that it heard
    heard: int = 0  # number of the last report of that executor whose consequences are on the disk


class StoredReport(NamedTuple):
    """Something that came before a record and is no fact: a report, as JSON values."""

    at: float
    report: Mapping[str, Any]


class StoredSnapshot(NamedTuple):
    """A balance as it is kept."""

    number: int  # of the last record in it
    balance: StateSnapshot
    details: Details  # of the jobs that are not over
    mark: CommitMark = CommitMark()


class StoredRecord(NamedTuple):
    """A record as it is kept."""

    number: int
    record: Record
    details: Details  # of the jobs it accepts
    notes: tuple[StoredReport, ...] = ()
    mark: CommitMark = CommitMark()


class Store:
    """Records, balances and the header of one daemon, in a folder.

    `record` takes a record in, `commit` makes all that was taken in durable, in both copies; only then may anybody be
    told that something was accepted. Opening a store puts right what one copy has lost from the other; `findings`
    says what it came upon.
    """

    def __init__(self, folder: Path, head: JournalHead, database: Database, log: AcceptLog, state: _State) -> None:
        self.folder = folder
        self.header = head.header
        self.findings = state.findings
        self.balance = state.balance  # the newest that is sound
        self.begun_at = head.begun_at
        self.mark = state.mark  # goes with every record from now on
        self._marked = state.mark  # in the newest record
        self._notes: list[StoredReport] = []
        self._database = database
        self._log = log
        self._first = head.first
        self._next = state.next
        self._before = state.accepted  # by the newest record
        self._last_crc = log.last_crc
        self._pending: deque[LogLine] = deque()
        self._one_commit = Lock()  # at a time, from whatever thread
        self._failed: BaseException | None = None  # why nothing more can be made durable
        self._due: tuple[StoredSnapshot, str, int] | None = None  # a balance for the next commit, and what to retain
        self._details: dict[JobId, Mapping[str, Any]] = {}

    @classmethod
    def open(cls, folder: Path, header: Header, now: Callable[[], float] = time.time) -> Store:
        """The store in a folder, begun there if none is; `header` is for a new one, or for one that lost its own.

        JournalError only where a newer version of carpool wrote it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        found = read_store(folder / DATABASE, folder / LOG)
        database, lines = found.database, found.lines
        header_lost = 0 not in lines and not found.is_new
        elapsed = max(
            (parse_entry(lines[number]).record.at for number in [max(lines, default=0)] if number), default=0.0
        )
        head = JournalHead.read(lines[0]) if 0 in lines else JournalHead(header, _oldest(database, lines))
        head = head if head.begun_at else head._replace(begun_at=now() - elapsed)
        lines[0] = head.line()
        lines = {number: line for number, line in lines.items() if number >= head.first or number == 0}
        findings = _findings(found, lines, head.first, header_lost=header_lost)
        log = _repaired(found, folder / LOG, lines)
        newest = max(lines)
        last = max(newest, head.first - 1)  # all may have been dropped behind a balance
        balance = _balance_of(database, head, last)
        mark = parse_entry(lines[newest]).mark if newest else balance.mark if balance is not None else CommitMark()
        state = _State(findings, balance, last + 1, _accepted(lines[newest]), mark)
        return cls(folder, head, database, log, state)

    # -------------------------------------------------------------------------------------------------------- writing
    def detail(self, job: JobId, details: Mapping[str, Any]) -> None:
        """Keep with the record that submits a job what it is made of."""
        self._details[job] = details

    def note(self, at: float, report: Mapping[str, Any]) -> None:
        """Keep with the next record what came before it and is no fact."""
        self._notes.append(StoredReport(at, report))

    def round_off(self, at: float) -> None:
        """Let an empty record hold what was noted or marked since the last one, so that a commit leaves nothing out."""
        if self._notes or self.mark != self._marked:
            self.record(Record(at, ()))

    def record(self, record: Record) -> None:
        """Take a record in; it is durable after the next `commit`."""
        accepted = [fact.spec.id for fact in record.facts if isinstance(fact, JobSubmitted)]
        body: dict[str, Any] = {"before": self._before} if self._before else {}
        body["record"] = record_to_json(record)
        details = {job: self._details.pop(job) for job in accepted if job in self._details}
        if details:
            body["details"] = details
        if self._notes:
            body["notes"], self._notes = self._notes, []
        if self.mark != CommitMark():
            body["mark"] = self._marked = self.mark
        line = LogLine.after(self._last_crc, self._next, _text(body))
        self._pending.append(line)
        self._last_crc = line.crc
        self._next += 1
        self._before = accepted

    def commit(self) -> None:
        """Make durable, in both copies or in none, what was taken in until now; `record` may go on meanwhile.

        Where that fails, what was taken in counts as never said, and so does all that follows from it: the store has to
        be opened anew. A balance that cannot be written fails nobody: it only saves the next start some time.
        """
        with self._one_commit:
            if self._failed is not None:
                raise self._failed
            batch = [self._pending.popleft() for _ in range(len(self._pending))]
            if batch:
                self._add(batch)
            if self._due is not None:
                kept, text, retained = self._due
                self._due = None
                with suppress(OSError, sqlite3.Error):
                    self._write_balance(kept, text)
                    self.retain(retained)

    def _add(self, batch: list[LogLine]) -> None:
        end = self._log.end
        try:
            self._log.add(batch)
            try:
                self._database.add(batch)
            except sqlite3.Error:
                self._log.rewind(*end)
                raise
        except BaseException as error:
            self._failed = error
            raise

    def keep_balance(self, balance: StateSnapshot, details: Details | None = None) -> None:
        """Keep where everything stood after the last committed record, so that a start need not fold what is older."""
        assert not self._pending, "a balance is of what is committed"
        self._due = None  # an older one
        kept = self.close_books(balance, details)
        self._write_balance(kept, snapshot_text(kept))

    def close_books(self, balance: StateSnapshot, details: Details | None = None) -> StoredSnapshot:
        """A balance of all records taken in until now, to be put down once it is written out."""
        return StoredSnapshot(self._next - 1, balance, details or {}, self._marked)

    def put_down(self, kept: StoredSnapshot, text: str, retained: int) -> None:
        """Keep a balance with the next commit, and of what is older so many records: what it stands for is durable."""
        self._due = (kept, text, retained)

    def _write_balance(self, kept: StoredSnapshot, text: str) -> None:
        self._database.add_balance(kept.number, crc32(text.encode("ascii")), text, _BALANCES_KEPT)
        self.balance = kept

    def retain(self, records: int) -> None:
        """Drop what is older than so many records, in one go once it has become a quarter more."""
        if self.balance is not None and self.balance.number + 1 - self._first > records * 1.25:
            self.forget_before(self.balance.number + 1 - records)

    def forget_before(self, number: int) -> None:
        """Drop records older than a number, at most those that the newest balance stands for.

        The log keeps that balance too: of what is dropped nothing else is left.
        """
        if self.balance is None:
            return
        first = max(self._first, min(number, self.balance.number + 1))
        line = JournalHead(self.header, first, self.balance, self.begun_at).line()
        kept = [kept for kept in self._database.lines() if kept.is_sound and kept.number >= first]
        log = AcceptLog.write_anew(self.folder / LOG, [line, *kept])  # a full disk leaves the old one as it is
        self._log.close()
        self._log, self._first = log, first
        self._database.add([line])
        self._database.retain({kept.number for kept in (line, *kept)})

    # -------------------------------------------------------------------------------------------------------- reading
    def entries(self, after: int = 0) -> Iterator[StoredRecord]:
        """What is kept of the records behind a number, oldest first."""
        for line in self._database.lines():
            if line.number > after and line.is_sound:
                yield parse_entry(line)

    def records(self) -> Iterator[Record]:
        """Every record kept, oldest first."""
        return (entry.record for entry in self.entries())

    def close(self) -> None:
        """Commit, unless that has failed before, and let go."""
        if self._failed is None:
            self.commit()
        self._log.close()
        self._database.close()


class JournalHead(NamedTuple):
    """The line before the first record: what the journal is about, where it begins, and what stands for the rest."""

    header: Header
    first: int = 1  # the oldest record that should be there
    balance: StoredSnapshot | None = None  # kept here too when records were dropped
    begun_at: float = 0.0  # Unix time of instant 0

    def line(self) -> LogLine:
        """The head as line 0."""
        body: dict[str, Any] = {"header": header_to_json(self.header), "store": len(MIGRATIONS), "first": self.first}
        if self.begun_at:
            body["begun_at"] = self.begun_at
        if self.balance is not None:
            body["balance"] = _kept_to_json(self.balance)
        return LogLine.after(0, 0, _text(body))

    @classmethod
    def read(cls, line: LogLine) -> JournalHead:
        """The inverse of `line`."""
        body = json.loads(line.body)
        kept = _kept_from_json(body["balance"]) if "balance" in body else None
        return cls(header_from_json(body["header"]), body["first"], kept, body.get("begun_at", 0.0))


class _State(NamedTuple):
    findings: IntegrityReport
    balance: StoredSnapshot | None
    next: int
    accepted: list[JobId]  # by the newest record
    mark: CommitMark


def parse_entry(line: LogLine) -> StoredRecord:
    """A sound line read."""
    body = json.loads(line.body)
    notes = tuple(StoredReport(at, report) for at, report in body.get("notes", ()))
    return StoredRecord(
        line.number, record_from_json(body["record"]), body.get("details", {}), notes, CommitMark(*body.get("mark", ()))
    )


def _oldest(database: Database, lines: Mapping[int, LogLine]) -> int:
    """The oldest record that should be there, where the head is lost: older ones were dropped only behind a balance."""
    return min(lines, default=1) if any(database.balances()) else 1


def _findings(found: StoreContents, lines: Mapping[int, LogLine], first: int, *, header_lost: bool) -> IntegrityReport:
    """What was amiss; `lines` are all there are from now on."""
    rows, logged = found.rows.keys(), found.reading.lines.keys()
    records = lines.keys() - {0}
    return IntegrityReport(
        from_log=tuple(sorted(records & logged - rows)),
        from_database=tuple(sorted(records & rows - logged)),
        lost=find_lost_records(lines, first, found.reading),
        set_aside=found.set_aside,
        cut=found.reading.cut,
        header_lost=header_lost,
    )


def _repaired(found: StoreContents, path: Path, lines: Mapping[int, LogLine]) -> AcceptLog:
    """Both copies hold all lines there are; the log is written anew unless it was whole."""
    database, reading = found.database, found.reading
    ordered = [lines[number] for number in sorted(lines)]
    missing = [line for line in ordered if found.rows.get(line.number) != line]
    if missing:
        database.add(missing)
    database.retain(lines.keys())  # a row that is not sound must not be read as one later
    is_whole = reading.is_ended and not reading.damaged and reading.lines == lines
    if is_whole:
        return AcceptLog.extend(path, ordered[-1].crc)
    return AcceptLog.write_anew(path, ordered)


def snapshot_text(kept: StoredSnapshot) -> str:
    """A balance as it is kept; with many jobs this takes a while."""
    return _text(_kept_to_json(kept))


def _kept_to_json(kept: StoredSnapshot) -> dict[str, Any]:
    body = {"number": kept.number, "balance": snapshot_to_json(kept.balance), "details": kept.details}
    return body if kept.mark == CommitMark() else {**body, "mark": kept.mark}


def _kept_from_json(value: dict[str, Any]) -> StoredSnapshot:
    balance, mark = snapshot_from_json(value["balance"]), CommitMark(*value.get("mark", ()))
    return StoredSnapshot(value["number"], balance, value["details"], mark)


def _balance_of(database: Database, head: JournalHead, last: int) -> StoredSnapshot | None:
    """The newest balance that is sound and not ahead of the records; the head's where the database has none."""
    for number, crc, body in database.balances():
        if number <= last and crc32(body.encode("ascii")) == crc:
            return _kept_from_json(json.loads(body))
    return head.balance


def _accepted(line: LogLine) -> list[JobId]:
    if line.number == 0:
        return []
    return [fact.spec.id for fact in parse_entry(line).record.facts if isinstance(fact, JobSubmitted)]


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))  # ASCII, in one line
