"""What a start finds in a store's folder: the lines of both copies together, and what can be saved of ruins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import JournalError
from carpool.service.accept_log import LogLine, LogReading, Remains, read_log, sync_folder
from carpool.service.database import MIGRATIONS, Database
from carpool.service.findings import find_lost
from carpool.service.mending import mend
from carpool.service.salvage import salvage

_FARTHEST = 1000  # a higher version is damage: there will never be so many


class StoreFound(NamedTuple):
    """Everything that is there."""

    database: Database  # one to go on with
    rows: Mapping[int, LogLine]  # sound ones of the database
    reading: LogReading  # of the log
    salvaged: Mapping[int, LogLine]  # that neither shows any more
    set_aside: Path | None  # a database that could not be read

    @property
    def lines(self) -> dict[int, LogLine]:
        """All sound lines, by number."""
        return {**self.salvaged, **self.rows, **self.reading.lines}

    @property
    def is_new(self) -> bool:
        """Whether nothing was there."""
        return not self.lines and not self.reading.damaged and self.set_aside is None


def find(path: Path, log: Path) -> StoreFound:
    """Look at the database and the log of a store; JournalError where a newer version of carpool wrote it."""
    reading = _rejoined(read_log(log.read_bytes() if log.is_file() else b""))
    wal = path.with_name(f"{path.name}-wal")
    frames = wal.read_bytes() if wal.is_file() else b""  # what SQLite does not believe in it, it overwrites
    database, rows, set_aside = _open_database(path, reading)
    found = StoreFound(database, rows, reading, {}, set_aside)
    if lost := _gaps(found):
        mended = _mended(reading, lost)
        ruins = (frames, (set_aside or path).read_bytes())
        rest = [number for number in lost if number not in mended]
        found = found._replace(salvaged=mended | salvage(ruins, rest, found.lines | mended))
    return found


def _rejoined(reading: LogReading) -> LogReading:
    """Remains that are one line: a flipped bit can look like the end of one."""
    joined: list[Remains] = []
    for remains in reading.damaged:
        if joined and joined[-1].after == remains.after:
            whole = joined[-1].text + b"\n" + remains.text
            if mend(whole) is not None:
                joined[-1] = Remains(remains.after, whole)
                continue
        joined.append(remains)
    return reading._replace(damaged=tuple(joined))


def _mended(reading: LogReading, lost: Collection[int]) -> dict[int, LogLine]:
    """Those of the lost lines that only one bit of the log has taken, as far as what is around them agrees."""
    found = {line.number: line for remains in reading.damaged if (line := mend(remains.text)) is not None}
    known = {**reading.lines, **found}
    return {number: line for number, line in found.items() if number in lost and _fits(line, known)}


def _fits(line: LogLine, known: Mapping[int, LogLine]) -> bool:
    """Whether a line continues the chain from the one before it, and is continued by the one behind it."""
    before, behind = known.get(line.number - 1), known.get(line.number + 1)
    return (before is None or line.before == before.crc) and (behind is None or behind.before == line.crc)


def _gaps(found: StoreFound) -> list[int]:
    """Numbers of lines that should be there and are not."""
    lines = found.lines
    if not lines or max(lines) == 0:
        return []
    first = json.loads(lines[0].body)["first"] if 0 in lines else min(number for number in lines if number)
    return [*([] if 0 in lines else [0]), *(number for number, _ in find_lost(lines, first, found.reading))]


def _open_database(path: Path, reading: LogReading) -> tuple[Database, dict[int, LogLine], Path | None]:
    """The database and its sound lines; a damaged one is set aside and a new one begun with what could be read."""
    rows: dict[int, LogLine] = {}
    try:
        database = Database(path)
        try:
            if _is_readable(database, reading, rows):
                return database, rows, None
        except BaseException:
            database.close()
            raise
        database.close()
    except (sqlite3.Error, UnicodeDecodeError):  # the latter where SQLite quotes damage in its own error
        pass
    aside = _set_aside(path)
    database = Database(path)
    database.add(rows.values())
    return database, rows, aside


def _is_readable(database: Database, reading: LogReading, rows: dict[int, LogLine]) -> bool:
    """Read the sound lines into `rows`; whether the database is one to go on with."""
    _refuse_newer(database, reading)
    for line in database.lines():
        if line.is_sound:
            rows[line.number] = line
    return database.version <= len(MIGRATIONS) and database.is_sound and not database.is_locked_by_damage


def _refuse_newer(database: Database, reading: LogReading) -> None:
    """JournalError for a store of a newer carpool, unless the log says that the number in the database is damage."""
    logged = json.loads(reading.lines[0].body).get("store", 0) if 0 in reading.lines else database.version
    if len(MIGRATIONS) < min(database.version, logged) <= _FARTHEST:
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
    sync_folder(path.parent)
    return aside
