"""A journal in a file: every record is on its way to the disk before the orders that follow from it are carried out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from carpool.core.errors import InputError, cause
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import Record


class JournalFile:
    """Writes records as they come and flushes each. Implements the JournalStore port."""

    def __init__(self, path: Path, stream: TextIO, writer: JournalWriter) -> None:
        self._path = path
        self._stream = stream
        self._writer = writer

    @classmethod
    def create(cls, path: Path, header: Header) -> JournalFile:
        """Begin a journal."""
        try:
            stream = path.open("w", encoding="ascii")
        except OSError as error:
            raise InputError(
                f"the journal cannot be written: {cause(error)}", where=str(path), way_out="Name another place."
            ) from None
        journal = cls(path, stream, JournalWriter(stream, header))
        stream.flush()
        return journal

    @classmethod
    def extend(cls, path: Path) -> JournalFile:
        """Go on with a journal; a last line that was cut off is dropped."""
        drop_cut_line(path)
        stream = path.open("a", encoding="ascii")
        return cls(path, stream, JournalWriter(stream, None))

    def record(self, record: Record) -> None:
        """Append one record and hand it to the system."""
        self._writer.record(record)
        self._stream.flush()

    def records(self) -> Iterator[Record]:
        """Every record kept, oldest first."""
        with self._path.open(encoding="ascii") as lines:
            yield from read_journal(lines)[1]

    def close(self) -> None:
        """Flush to the disk and let go."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()


def read_whole(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a journal whose last line may be cut off."""
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    header, records = read_journal(lines)
    return header, list(records)


def drop_cut_line(path: Path) -> None:
    """Cut a file behind its last whole line: a process that was killed may have left half of one."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
