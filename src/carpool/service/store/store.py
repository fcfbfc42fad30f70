"""Journal store: records in SQLite and in the accept log, made durable by one commit."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

from carpool.backends.executors import LOCAL
from carpool.core.errors import CarpoolError, JournalError
from carpool.core.journal import (
    UNUSABLE,
    Header,
    SkippedItem,
    header_from_json,
    header_to_json,
    record_from_json,
    record_to_json,
    salvage_record,
    skipped_item,
)
from carpool.core.messages import JobSubmitted, Record
from carpool.core.model import JobId
from carpool.core.state.state_snapshot import StateSnapshot, snapshot_from_json, snapshot_to_json
from carpool.core.typed_fields import Amount, decode_value
from carpool.service.store.accept_log import AcceptLog, LogLine, read_log
from carpool.service.store.database import MEMORY, MIGRATIONS, Database
from carpool.service.store.disk_space import is_disk_full
from carpool.service.store.integrity import IntegrityReport, StoreContents, find_lost_records, read_store

DATABASE = "journal.sqlite"
LOG = "accepted.log"

_SNAPSHOTS_KEPT = 2  # the newest, and one in case it is damaged
_MARKED_EVERY = 256  # records, one of which names all executors; the others those that changed

Details = Mapping[JobId, Mapping[str, Any]]  # a job's program and notes, as JSON values


class StoreFull(CarpoolError):
    """The disk has no room for the journal; what was added waits for the next commit."""


class ExecutorMark(NamedTuple):
    """The last report of one executor whose consequences are stored."""

    life: int = 0  # of the executor process
    heard: int = 0  # number of the report


_NO_EXECUTORS: Mapping[str, ExecutorMark] = {}


class CommitMark(NamedTuple):
    """The daemon's start and its executors' reports up to a record."""

    epoch: int = 0  # number of claims so far
    executors: Mapping[str, ExecutorMark] = _NO_EXECUTORS  # by name

    def of(self, executor: str) -> ExecutorMark:
        return self.executors.get(executor, ExecutorMark())

    is_whole: bool = True  # names all executors, not only those that changed since the record before

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "executors" if self.is_whole else "changed": self.executors}

    @classmethod
    def from_json(cls, value: Any) -> CommitMark:
        """The inverse of `to_json`; before store version 2 a mark was ``[epoch, life, heard]`` of one executor."""
        if isinstance(value, list):
            epoch, *mark = decode_value(tuple[int, int, int], value, "CommitMark.epoch")
            return cls(epoch, {LOCAL: ExecutorMark(*mark)})
        epoch, is_whole = decode_value(int, value["epoch"], "CommitMark.epoch"), "executors" in value
        named = value["executors" if is_whole else "changed"]
        return cls(epoch, decode_value(Mapping[str, ExecutorMark], named, "CommitMark.executors"), is_whole)


class StoredReport(NamedTuple):
    """A report other than facts that came before a record, as JSON values."""

    at: Amount
    report: Mapping[str, Any]


class StoredSnapshot(NamedTuple):
    """The scheduler's state after a record."""

    number: int  # of the last record in it
    state: StateSnapshot
    details: Details  # of the jobs that are not over
    mark: CommitMark = CommitMark()
    skipped: tuple[SkippedItem, ...] = ()  # jobs with values that cannot be used


class StoredRecord(NamedTuple):
    """A record with what is stored beside it."""

    number: int
    record: Record
    details: Details  # of the jobs it submits
    reports: tuple[StoredReport, ...] = ()
    mark: CommitMark = CommitMark()
    skipped: tuple[SkippedItem, ...] = ()  # parts of it that cannot be used


class _Files(NamedTuple):
    database: Database
    log: AcceptLog


class Store:
    """Records, snapshots and the header of one daemon or run, in a folder.

    `record` adds a record, `commit` makes all added records durable in both copies. Opening a store repairs either copy
    from the other; `findings` is the report. A new store writes nothing before its first commit. Without `sync` a
    commit survives the death of this process, but not of the machine.
    """

    def __init__(self, folder: Path, head: JournalHead, state: _State, files: _Files | None, *, sync: bool) -> None:
        self.folder = folder
        self.header = head.header
        self.begun_at = head.begun_at
        self.findings = state.findings
        self.snapshot = state.snapshot  # the newest that is sound
        self._epoch = state.mark.epoch
        self._marks = dict(state.mark.executors)  # the newest of every executor
        self._changed: dict[str, ExecutorMark] = {}  # those that the next record has to name
        self._stored_epoch, self._stored_marks = state.mark.epoch, dict(state.mark.executors)  # up to the newest record
        self._until_whole = 0  # further records that may leave out unchanged marks
        self._head = head
        self._files = files
        self._sync = sync
        self._next = state.next
        self._submitted = state.submitted  # by the newest record
        self._last_crc = head.line().crc if files is None else files.log.last_crc
        self._pending: deque[LogLine] = deque()
        self._reports: list[StoredReport] = []
        self._details: dict[JobId, Mapping[str, Any]] = {}
        self._commit_lock = Lock()  # one commit at a time, from any thread
        self._failed: BaseException | None = None  # why nothing can be made durable any longer
        self._due: tuple[StoredSnapshot, str, int] | None = None  # a snapshot for the next commit, records to retain

    @classmethod
    def open(cls, folder: Path, header: Header, now: Callable[[], float] = time.time, *, sync: bool = True) -> Store:
        """Open the store in a folder; `header` is for a new one, or for one that lost its own.

        On a full disk SQLite may not open its file: then the log is read, and the file is repaired at the next start.
        JournalError if a newer version of carpool wrote it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return cls._open(folder, header, now, sync=sync)
        except (OSError, sqlite3.Error) as error:
            if not is_disk_full(error, folder) or not (folder / LOG).is_file():
                raise
            return cls._open(folder, header, now, sync=sync, in_memory=True)

    @classmethod
    def _open(
        cls, folder: Path, header: Header, now: Callable[[], float], *, sync: bool, in_memory: bool = False
    ) -> Store:
        if not (folder / DATABASE).exists() and not (folder / LOG).exists():
            head = JournalHead(header, begun_at=now())
            return cls(folder, head, _State(), None, sync=sync)
        found = read_store(MEMORY if in_memory else folder / DATABASE, folder / LOG, sync=sync)
        database, lines = found.database, found.lines
        header_lost = 0 not in lines and not found.is_new
        elapsed = max((parse_entry(lines[last]).record.at for last in [max(lines, default=0)] if last), default=0.0)
        head = JournalHead.read(lines[0]) if 0 in lines else JournalHead(header, _oldest(database, lines))
        head = head if head.begun_at else head._replace(begun_at=now() - elapsed)
        lines[0] = head.line()
        lines = {number: line for number, line in lines.items() if number >= head.first or number == 0}
        findings = _findings(found, lines, head.first, header_lost=header_lost)
        log = _repaired(found, folder / LOG, lines, sync=sync)
        newest = max(lines)
        last = max(newest, head.first - 1)  # a snapshot may have replaced all records
        snapshot = _newest_snapshot(database, head, last)
        mark = _newest_mark(lines, CommitMark() if snapshot is None else snapshot.mark)
        state = _State(findings, snapshot, last + 1, _submitted(lines[newest]), mark)
        return cls(folder, head, state, _Files(database, log), sync=sync)

    @property
    def mark(self) -> CommitMark:
        """The newest mark; the next record stores what changed in it."""
        return CommitMark(self._epoch, self._marks)

    @mark.setter
    def mark(self, mark: CommitMark) -> None:
        self._epoch = mark.epoch
        for name in self._marks.keys() - mark.executors.keys():
            del self._marks[name]
            self._until_whole = 0
        for name, each in mark.executors.items():
            self.set_mark(name, each)

    def set_mark(self, executor: str, mark: ExecutorMark) -> None:
        """Set an executor's last report, for the next record to store."""
        if self._marks.get(executor) != mark:
            self._marks[executor] = self._changed[executor] = mark

    def detail(self, job: JobId, details: Mapping[str, Any]) -> None:
        self._details[job] = details

    def add_report(self, at: float, report: Mapping[str, Any]) -> None:
        self._reports.append(StoredReport(at, report))

    def flush_reports(self, at: float) -> None:
        """If reports or a mark are not stored yet, add an empty record to carry them."""
        if self._reports or self._changed or self._epoch != self._stored_epoch:
            self.record(Record(at, ()))

    def record(self, record: Record) -> None:
        submitted = [fact.spec.id for fact in record.facts if isinstance(fact, JobSubmitted)]
        body: dict[str, Any] = {"before": self._submitted} if self._submitted else {}
        body["record"] = record_to_json(record)
        details = {job: self._details.pop(job) for job in submitted if job in self._details}
        if details:
            body["details"] = details
        if self._reports:
            body["notes"], self._reports = self._reports, []
        if self._epoch or self._marks:
            body["mark"] = self._next_mark().to_json()
        line = LogLine.after(self._last_crc, self._next, _text(body))
        self._pending.append(line)
        self._last_crc = line.crc
        self._next += 1
        self._submitted = submitted

    def _next_mark(self) -> CommitMark:
        """The mark of the next record: with many executors mostly of those that changed."""
        changed, self._changed = self._changed, {}
        self._stored_epoch = self._epoch
        self._stored_marks.update(changed)
        self._until_whole -= 1
        if self._until_whole < 0 or len(changed) == len(self._marks):
            self._until_whole = _MARKED_EVERY
            return CommitMark(self._epoch, dict(self._marks))
        return CommitMark(self._epoch, changed, is_whole=False)

    def commit(self) -> None:
        """Make all added records durable, in both copies or in none; `record` may be called meanwhile.

        They are written to the accept log (`fdatasync`), then to SQLite (`synchronous = FULL`); without `sync`, as in
        `carpool run`, commits are not flushed to the disk.

        StoreFull if the disk has no room: nothing is lost, and the next call tries again. After any other failure the
        store cannot be used and has to be opened again. A snapshot that cannot be written is dropped: it only speeds up
        the next start.
        """
        with self._commit_lock:
            if self._failed is not None:
                raise self._failed
            batch = [self._pending.popleft() for _ in range(len(self._pending))]
            if batch:
                self._add(batch)
            if self._due is not None:
                kept, text, retained = self._due
                self._due = None
                with suppress(OSError, sqlite3.Error):
                    self._write_snapshot(kept, text)
                    self.retain(retained)

    def _add(self, batch: list[LogLine]) -> None:
        try:
            files = self._opened()
            end = files.log.end
            files.log.add(batch)
            try:
                files.database.add(batch)
            except sqlite3.Error:
                files.log.rewind(*end)
                raise
        except BaseException as error:
            if is_disk_full(error, self.folder):
                self._pending.extendleft(reversed(batch))
                raise StoreFull(f"no room for the journal in {self.folder}: {error}") from error
            self._failed = error
            raise

    def _opened(self) -> _Files:
        """The files; those of a new store are created here."""
        if self._files is None:
            line = self._head.line()
            database = Database(self.folder / DATABASE, sync=self._sync)
            try:
                database.add([line])
                self._files = _Files(database, AcceptLog.write_anew(self.folder / LOG, [line], sync=self._sync))
            except BaseException:
                database.close()
                raise
        return self._files

    def take_snapshot(self, state: StateSnapshot, details: Details | None = None) -> StoredSnapshot:
        """A snapshot after all records added so far, to be serialized and then stored by `store_snapshot_later`."""
        mark = CommitMark(self._stored_epoch, dict(self._stored_marks))
        return StoredSnapshot(self._next - 1, state, details or {}, mark)

    def store_snapshot(self, state: StateSnapshot, details: Details | None = None) -> None:
        """Store a snapshot after the last committed record, so that the next start folds only what follows it."""
        assert not self._pending, "a snapshot holds committed records only"
        self._due = None  # an older one
        kept = self.take_snapshot(state, details)
        self._write_snapshot(kept, snapshot_text(kept))

    def store_snapshot_later(self, kept: StoredSnapshot, text: str, retained: int) -> None:
        """Store a snapshot with the next commit, and then drop all but this many records."""
        self._due = (kept, text, retained)

    def _write_snapshot(self, kept: StoredSnapshot, text: str) -> None:
        self._opened().database.add_snapshot(kept.number, crc32(text.encode("ascii")), text, _SNAPSHOTS_KEPT)
        self.snapshot = kept

    def retain(self, records: int) -> None:
        """Drop the oldest records once a quarter more than this many are stored."""
        if self.snapshot is not None and self.snapshot.number + 1 - self._head.first > records * 1.25:
            self.forget_before(self.snapshot.number + 1 - records)

    def forget_before(self, number: int) -> None:
        """Drop records before a number that the newest snapshot holds; the log then keeps that snapshot too."""
        if self.snapshot is None:
            return
        database, log = self._opened()
        first = max(self._head.first, min(number, self.snapshot.number + 1))
        head = self._head._replace(first=first, snapshot=self.snapshot)
        line = head.line()
        kept = [kept for kept in database.lines() if kept.is_sound and kept.number >= first]
        fresh = AcceptLog.write_anew(self.folder / LOG, [line, *kept], sync=self._sync)
        log.close()
        self._files, self._head = _Files(database, fresh), head
        database.add([line])
        database.retain({kept.number for kept in (line, *kept)})

    def entries(self, after: int = 0) -> Iterator[StoredRecord]:
        for line in () if self._files is None else self._files.database.lines():
            if line.number > after and line.is_sound:
                yield parse_entry(line)

    def records(self) -> Iterator[Record]:
        return (entry.record for entry in self.entries())

    def close(self) -> None:
        if self._failed is None:
            with suppress(StoreFull):  # its content was never confirmed
                self.commit()
        if self._files is not None:
            self._files.log.close()
            self._files.database.close()


class JournalHead(NamedTuple):
    """Line 0 of a journal: its header, its first record, and the snapshot that stands for dropped ones."""

    header: Header
    first: int = 1  # the oldest record that should exist
    snapshot: StoredSnapshot | None = None  # stored here too when records were dropped
    begun_at: float = 0.0  # Unix time of instant 0

    def line(self) -> LogLine:
        body: dict[str, Any] = {"header": header_to_json(self.header), "store": len(MIGRATIONS), "first": self.first}
        if self.begun_at:
            body["begun_at"] = self.begun_at
        if self.snapshot is not None:
            body["balance"] = _snapshot_to_json(self.snapshot)
        return LogLine.after(0, 0, _text(body))

    @classmethod
    def read(cls, line: LogLine) -> JournalHead:
        body = json.loads(line.body)
        kept = _snapshot_from_json(body["balance"]) if "balance" in body else None
        return cls(header_from_json(body["header"]), body["first"], kept, body.get("begun_at", 0.0))


class _State(NamedTuple):
    """What opening a store found."""

    findings: IntegrityReport = IntegrityReport()
    snapshot: StoredSnapshot | None = None
    next: int = 1
    submitted: Sequence[JobId] = ()  # by the newest record
    mark: CommitMark = CommitMark()


def has_store(folder: Path) -> bool:
    """Whether a folder holds a store."""
    return (folder / LOG).is_file()


def read_records(folder: Path) -> tuple[Header, list[Record]]:
    """Header and records of a store, read from its log; another process may be writing it."""
    lines = read_log((folder / LOG).read_bytes()).lines
    if 0 not in lines:
        raise JournalError(f"{folder / LOG} has no readable header")
    header = JournalHead.read(lines[0]).header
    return header, [parse_entry(lines[number]).record for number in sorted(lines) if number]


def parse_entry(line: LogLine) -> StoredRecord:
    """The record of a sound line; values that cannot be used are left out and listed."""
    try:
        body = json.loads(line.body)
        reports = decode_value(tuple[StoredReport, ...], body.get("notes", ()), "record.notes")
        mark = CommitMark.from_json(body["mark"]) if "mark" in body else CommitMark()
        details = decode_value(Mapping[str, Mapping[str, Any]], body.get("details", {}), "record.details")
    except UNUSABLE as error:
        return StoredRecord(line.number, Record(0.0, ()), {}, skipped=(skipped_item("", error),))
    try:
        return StoredRecord(line.number, record_from_json(body["record"]), details, reports, mark)
    except UNUSABLE:
        record, skipped = salvage_record(body.get("record"))
        return StoredRecord(line.number, record, details, reports, mark, tuple(skipped))


def _newest_mark(lines: Mapping[int, LogLine], before: CommitMark) -> CommitMark:
    """The mark after the last line, collected backwards up to one that names all executors; else up to `before`."""
    epoch, named = None, dict[str, ExecutorMark]()
    for number in sorted(lines, reverse=True):
        mark = parse_entry(lines[number]).mark if number else before
        epoch = mark.epoch if epoch is None else epoch
        named = {**mark.executors, **named}
        if number and mark.is_whole:
            break
    return CommitMark(before.epoch if epoch is None else epoch, named)


def _oldest(database: Database, lines: Mapping[int, LogLine]) -> int:
    """The oldest record that should exist, if the head is lost: only records before a snapshot are dropped."""
    return min(lines, default=1) if any(database.snapshots()) else 1


def _findings(found: StoreContents, lines: Mapping[int, LogLine], first: int, *, header_lost: bool) -> IntegrityReport:
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


def _repaired(found: StoreContents, path: Path, lines: Mapping[int, LogLine], *, sync: bool) -> AcceptLog:
    """Write all lines to both copies; the log is rewritten unless it was whole."""
    database, reading = found.database, found.reading
    ordered = [lines[number] for number in sorted(lines)]
    missing = [line for line in ordered if found.rows.get(line.number) != line]
    if missing:
        database.add(missing)
    database.retain(lines.keys())  # an unsound row must not be taken for a sound one later
    is_whole = reading.is_ended and not reading.damaged and reading.lines == lines
    if is_whole:
        return AcceptLog.extend(path, ordered[-1].crc, sync=sync)
    return AcceptLog.write_anew(path, ordered, sync=sync)


def snapshot_text(kept: StoredSnapshot) -> str:
    """The stored text of a snapshot; slow with many jobs."""
    return _text(_snapshot_to_json(kept))


def _snapshot_to_json(kept: StoredSnapshot) -> dict[str, Any]:
    body = {"number": kept.number, "balance": snapshot_to_json(kept.state), "details": kept.details}
    return body if kept.mark == CommitMark() else {**body, "mark": kept.mark.to_json()}


def _snapshot_from_json(value: dict[str, Any]) -> StoredSnapshot:
    mark = CommitMark.from_json(value["mark"]) if "mark" in value else CommitMark()
    skipped: list[SkippedItem] = []
    state = snapshot_from_json(value["balance"], skipped)
    return StoredSnapshot(value["number"], state, value["details"], mark, tuple(skipped))


def _newest_snapshot(database: Database, head: JournalHead, last: int) -> StoredSnapshot | None:
    """The newest snapshot that is sound and not ahead of the records; the head's if the database has none."""
    for number, crc, body in database.snapshots():
        if number <= last and crc32(body.encode("ascii")) == crc:
            with suppress(*UNUSABLE):  # else an older one
                return _snapshot_from_json(json.loads(body))
    return head.snapshot


def _submitted(line: LogLine) -> Sequence[JobId]:
    if line.number == 0:
        return []
    return [fact.spec.id for fact in parse_entry(line).record.facts if isinstance(fact, JobSubmitted)]


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))  # ASCII, in one line
