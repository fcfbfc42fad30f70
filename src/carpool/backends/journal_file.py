"""Journal file: writes records as JSON lines for ``--journal``, and reads such files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from carpool.core.errors import InputError, cause
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import Record


class JournalFile:
    """An observer that appends every record to a file and flushes it."""

    def __init__(self, path: Path, header: Header) -> None:
        try:
            self._stream: TextIO = path.open("w", encoding="ascii")
        except OSError as error:
            raise InputError(
                f"the journal cannot be written: {cause(error)}", where=str(path), way_out="Name another file."
            ) from None
        self._writer = JournalWriter(self._stream, header)
        self._stream.flush()

    def record(self, record: Record) -> None:
        self._writer.record(record)
        self._stream.flush()

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if not self._stream.closed:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()


def read_journal_file(path: Path) -> tuple[Header, list[Record]]:
    """Header and records of a journal; a last line that was cut off is skipped."""
    lines = path.read_text(encoding="ascii").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    header, records = read_journal(lines)
    return header, list(records)
