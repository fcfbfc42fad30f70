"""SQLite file of a store: schema migrations, journal lines and state snapshots; all SQL is here."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from carpool.service.store.accept_log import LogLine

# Never edit a released migration: append the next one.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE lines (
        number INTEGER PRIMARY KEY,  -- 0 is the header, records follow from 1
        crc    INTEGER NOT NULL,
        before INTEGER NOT NULL,     -- checksum of the line before
        body   TEXT NOT NULL
    ) STRICT;
    CREATE TABLE balances (
        number INTEGER PRIMARY KEY,  -- of the last line that it contains
        crc    INTEGER NOT NULL,
        body   TEXT NOT NULL
    ) STRICT;
    """,
    "SELECT 1;",  # version 2: marks name their executor
    "SELECT 1;",  # version 3: marks name the executors that changed
)


MEMORY = Path(":memory:")  # SQLite's name of a database without a file

_TABLES = "SELECT type, name, sql FROM sqlite_master ORDER BY name"


class Database:
    """Journal lines and snapshots in SQLite, in write-ahead mode; without `sync` a power loss may drop the newest."""

    def __init__(self, path: Path, migrations: tuple[str, ...] = MIGRATIONS, *, sync: bool = True) -> None:
        self._path = path
        self._migrations = migrations
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._connection.text_factory = bytes  # a damaged page may hold bytes that are not text
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
            for number, script in enumerate(migrations, start=1):
                if number > self.version:
                    self._connection.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")
        except BaseException:
            self._connection.close()
            raise

    @property
    def version(self) -> int:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        return int(version)

    @property
    def is_sound(self) -> bool:
        """Whether its tables are those of the migrations and SQLite's quick check passes."""
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as model:
            model.text_factory = bytes
            for script in self._migrations:
                model.executescript(script)
            expected = model.execute(_TABLES).fetchall()
        return self._connection.execute(_TABLES).fetchall() == expected and self._connection.execute(
            "PRAGMA quick_check"
        ).fetchall() == [(b"ok",)]

    @property
    def is_locked_by_damage(self) -> bool:
        """Whether SQLite refuses to write to a writable file: one altered bit of its header can cause that."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(f"PRAGMA user_version = {self.version}")
        except sqlite3.OperationalError as error:
            return error.sqlite_errorcode == sqlite3.SQLITE_READONLY and os.access(self._path, os.W_OK)
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        return False

    def lines(self) -> Iterator[LogLine]:
        """Every well-formed line in order, sound or not."""
        for number, body, crc, before in self._connection.execute(
            "SELECT number, body, crc, before FROM lines ORDER BY number"
        ):
            if isinstance(crc, int) and isinstance(before, int) and isinstance(body, bytes) and body.isascii():
                yield LogLine(number, body.decode("ascii"), crc, before)

    def snapshots(self) -> Iterator[tuple[int, int, str]]:
        """(number, checksum, body) of every well-formed snapshot, newest first."""
        for number, crc, body in self._connection.execute(
            "SELECT number, crc, body FROM balances ORDER BY number DESC"
        ):
            if isinstance(crc, int) and isinstance(body, bytes) and body.isascii():
                yield number, crc, body.decode("ascii")

    def add(self, lines: Iterable[LogLine]) -> None:
        with self._transaction() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO lines (number, body, crc, before) VALUES (?, ?, ?, ?)", lines
            )

    def add_snapshot(self, number: int, crc: int, body: str, keep: int) -> None:
        with self._transaction() as connection:
            row = (number, crc, body)
            connection.execute("INSERT OR REPLACE INTO balances (number, crc, body) VALUES (?, ?, ?)", row)
            connection.execute(
                "DELETE FROM balances WHERE number NOT IN (SELECT number FROM balances ORDER BY number DESC LIMIT ?)",
                (keep,),
            )

    def retain(self, numbers: Collection[int]) -> None:
        found = [number for (number,) in self._connection.execute("SELECT number FROM lines")]
        gone = [(number,) for number in found if number not in numbers]
        if gone:
            with self._transaction() as connection:
                connection.executemany("DELETE FROM lines WHERE number = ?", gone)

    def close(self) -> None:
        self._connection.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._connection)


class _Transaction:
    """BEGIN … COMMIT around a block, ROLLBACK on failure unless SQLite rolled back by itself."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> sqlite3.Connection:
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            if kind is None:
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
