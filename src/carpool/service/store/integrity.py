"""Integrity check of a store: reads both copies, sets aside an unreadable database, reports lost records."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import JournalError
from carpool.core.model import JobId
from carpool.core.units import format_ranges
from carpool.service.store.accept_log import LogContents, LogLine, fsync_folder, read_log
from carpool.service.store.database import MIGRATIONS, Database
from carpool.service.store.disk_space import is_disk_full

_BEFORE = re.compile(rb'\{"before":(\[[^\]]*\])')
_QUOTED = re.compile(rb'"([A-Za-z0-9][\w.\-]*)"')
_NAME = re.compile(rb'"JobSubmitted","spec":\{"id":"([A-Za-z0-9][\w.\-]*)"|"([A-Za-z0-9][\w.\-]*)":\{"program":')


class LostRecord(NamedTuple):
    """A record that neither copy has, and those jobs submitted in it that are known."""

    number: int
    jobs: tuple[JobId, ...]


class IntegrityReport(NamedTuple):
    """What opening a store found damaged, and how it was repaired."""

    from_log: tuple[int, ...] = ()  # records missing in the database
    from_database: tuple[int, ...] = ()  # records damaged in the log
    lost: tuple[LostRecord, ...] = ()
    set_aside: Path | None = None  # an unreadable database
    cut: bool = False  # the log ended in the middle of a line, which was never acknowledged
    header_lost: bool = False

    @property
    def is_sound(self) -> bool:
        return not self.lost and not self.header_lost

    def messages(self) -> tuple[str, ...]:
        found = []
        if self.set_aside is not None:
            found.append(
                f"The database was unreadable; it was renamed to {self.set_aside.name} and rebuilt from the log."
            )
        if self.from_log:
            found.append(f"Records {format_ranges(self.from_log)} were missing in the database; restored from the log.")
        if self.from_database:
            found.append(
                f"Records {format_ranges(self.from_database)} were damaged in the log; restored from the database."
            )
        if self.cut:
            found.append("The log ended in the middle of a line; that line was never acknowledged and was dropped.")
        if self.header_lost:
            found.append("The journal's header was lost; replaced by the settings of this start.")
        for number, jobs in self.lost:
            names = f"Jobs submitted in it: {', '.join(repr(str(job)) for job in jobs)}."
            unknown = "Which jobs were submitted in it, if any, is unknown."
            found.append(
                f"Record {number} is lost: damaged in the log and in the database. {names if jobs else unknown}"
            )
        return tuple(found)


def find_lost_records(lines: Mapping[int, LogLine], first: int, reading: LogContents) -> tuple[LostRecord, ...]:
    """Records from `first` on that are in neither copy, with the jobs named by the next line or their damaged remains.

    `lines` are the records of both copies together. A record after the last of these is reported as lost only if the
    log has a damaged line there.
    """
    last = max(lines)
    lost = [number for number in range(max(1, first), last) if number not in lines]
    logged = max(reading.lines, default=-1)
    behind = [remains for remains in reading.damaged if remains.after == logged]
    lost += range(last + 1, last + 1 + len(behind[max(0, last - logged) :]))
    return tuple(LostRecord(number, _jobs_of(number, lines, reading)) for number in lost)


def _jobs_of(number: int, lines: Mapping[int, LogLine], reading: LogContents) -> tuple[JobId, ...]:
    """The jobs that a lost record submitted: from the next line, or from readable parts of both."""
    if number + 1 in lines:
        return accepted_before(lines[number + 1])
    own, behind = _remains(reading, number), _BEFORE.search(_remains(reading, number + 1))
    names = [found[1] or found[2] for found in _NAME.finditer(own)]  # each appears twice
    names += [] if behind is None else _QUOTED.findall(behind[1])
    return tuple(JobId(name.decode("ascii")) for name in dict.fromkeys(names))


def accepted_before(line: LogLine) -> tuple[JobId, ...]:
    """The jobs that the line before this one submitted."""
    return tuple(map(JobId, json.loads(line.body).get("before", ())))


def _remains(reading: LogContents, number: int) -> bytes:
    """The damaged bytes of a line, found by their position after the last sound line."""
    before = max((sound for sound in reading.lines if sound < number), default=-1)
    texts = [remains.text for remains in reading.damaged if remains.after == before]
    place = number - before - 1
    return texts[place] if place < len(texts) else b""


_MAX_VERSION = 1000  # a higher one is damage


class StoreContents(NamedTuple):
    """The database and the log of a store."""

    database: Database  # usable
    rows: Mapping[int, LogLine]  # sound lines of the database
    reading: LogContents  # of the log
    set_aside: Path | None  # an unreadable database

    @property
    def lines(self) -> dict[int, LogLine]:
        return {**self.rows, **self.reading.lines}

    @property
    def is_new(self) -> bool:
        return not self.lines and not self.reading.damaged and self.set_aside is None


def read_store(path: Path, log: Path, *, sync: bool = True) -> StoreContents:
    """Read the database and the log of a store; JournalError if a newer carpool wrote it."""
    reading = read_log(log.read_bytes() if log.is_file() else b"")
    database, rows, set_aside = _open_database(path, reading, sync)
    return StoreContents(database, rows, reading, set_aside)


def _open_database(path: Path, reading: LogContents, sync: bool) -> tuple[Database, dict[int, LogLine], Path | None]:
    """The database and its sound lines; a damaged one is renamed and replaced by a new one with what was readable."""
    rows: dict[int, LogLine] = {}
    try:
        database = Database(path, sync=sync)
        try:
            if _is_readable(database, reading, rows):
                return database, rows, None
        except BaseException:
            database.close()
            raise
        database.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: SQLite quotes damaged bytes in an error
        if is_disk_full(error, path.parent):  # a full disk is not damage
            raise
    aside = _set_aside(path)
    database = Database(path, sync=sync)
    database.add(rows.values())
    return database, rows, aside


def _is_readable(database: Database, reading: LogContents, rows: dict[int, LogLine]) -> bool:
    """Read the sound lines into `rows`. Returns whether the database is usable."""
    _refuse_newer(database, reading)
    for line in database.lines():
        if line.is_sound:
            rows[line.number] = line
    return database.version <= len(MIGRATIONS) and database.is_sound and not database.is_locked_by_damage


def _refuse_newer(database: Database, reading: LogContents) -> None:
    """JournalError for a store of a newer carpool, unless the log shows that the database's version is damage."""
    logged = json.loads(reading.lines[0].body).get("store", 0) if 0 in reading.lines else database.version
    if len(MIGRATIONS) < min(database.version, logged) <= _MAX_VERSION:
        raise JournalError(
            f"the store is of version {database.version}, this carpool reads up to {len(MIGRATIONS)}. "
            "Start the newer carpool, or restore an older backup."
        )


def _set_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    fsync_folder(path.parent)
    return aside
