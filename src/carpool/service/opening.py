"""Opens a store's folder: reads the database and the accept log, and sets aside a database that cannot be read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from carpool.core.errors import JournalError
from carpool.service.accept_log import LogLine, LogReading, read_log, sync_folder
from carpool.service.database import MIGRATIONS, Database

_FARTHEST = 1000  # a higher version is damage: there will never be so many


class StoreFound(NamedTuple):
    """Everything that is there."""

    database: Database  # one to go on with
    rows: Mapping[int, LogLine]  # sound ones of the database
    reading: LogReading  # of the log
    set_aside: Path | None  # a database that could not be read

    @property
    def lines(self) -> dict[int, LogLine]:
        """All sound lines, by number."""
        return {**self.rows, **self.reading.lines}

    @property
    def is_new(self) -> bool:
        """Whether nothing was there."""
        return not self.lines and not self.reading.damaged and self.set_aside is None


def find(path: Path, log: Path) -> StoreFound:
    """Look at the database and the log of a store; JournalError where a newer version of carpool wrote it."""
    reading = read_log(log.read_bytes() if log.is_file() else b"")
    database, rows, set_aside = _open_database(path, reading)
    return StoreFound(database, rows, reading, set_aside)


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
