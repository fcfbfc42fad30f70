"""Journal files: records as JSON lines (``--journal``), the journal of a run, and runs of carpool 0.1."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.run_folder import RunFolder
from carpool.core.errors import InputError, JournalError, cause
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import JobFinished, JobSubmitted, Record
from carpool.runtime.executor.client_protocol import report_to_json
from carpool.service.store.store import DATABASE, LOG, Store, has_store, read_records


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


_DRAFT = "import.part"


def read_run_journal(folder: RunFolder) -> tuple[Header, list[Record]]:
    """Header and records of a run, which may still be running; InputError if they cannot be read."""
    try:
        return read_records(folder.path) if has_store(folder.path) else read_journal_file(folder.legacy_journal)
    except (OSError, UnicodeDecodeError, JournalError) as error:
        raise InputError(
            f"its journal cannot be read: {cause(error) if isinstance(error, OSError) else error}",
            where=str(folder.path),
            way_out="Name another run.",
        ) from None


def has_journal(folder: RunFolder) -> bool:
    """Whether a run has recorded anything."""
    return has_store(folder.path) or folder.legacy_journal.is_file()


def is_unfinished(folder: RunFolder) -> bool:
    """Whether the folder holds a run with jobs that are not over."""
    if not folder.exists:
        return False
    if not has_journal(folder):
        return True
    header, records = read_run_journal(folder)
    accounting = JobAccounting(header.cluster)
    for record in records:
        accounting.record(record)
    accounts = accounting.accounts
    return any(spec.id not in accounts or not accounts[spec.id].phase.is_over for spec, _ in folder.settings().jobs)


def import_legacy_journal(folder: RunFolder) -> None:
    """Convert the journal file of carpool 0.1 into a store, if the run has one and no store."""
    if has_store(folder.path) or not folder.legacy_journal.is_file():
        return
    draft = folder.path / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    header, records = read_run_journal(folder)
    with closing(Store.open(draft, header)) as store:
        _import_records(store, folder, records)
    (draft / DATABASE).replace(folder.path / DATABASE)
    (draft / LOG).replace(folder.path / LOG)  # last: with it, the store counts as complete
    draft.rmdir()


def _import_records(store: Store, folder: RunFolder, records: Sequence[Record]) -> None:
    programs = {spec.id: program for spec, program in folder.settings().jobs}
    for record in records:
        for fact in record.facts:
            if isinstance(fact, JobSubmitted) and fact.spec.id in programs:
                store.detail(fact.spec.id, {"program": programs[fact.spec.id].as_json()})
            elif isinstance(fact, JobFinished) and (outcome := folder.outcome(fact.job)) is not None:
                store.add_report(record.at, report_to_json(outcome))
        store.record(record)
    store.commit()
