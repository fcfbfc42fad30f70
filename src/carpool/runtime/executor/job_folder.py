"""Job folder on disk: log, checkpoints, and the recorded batch splits. The job can write to it: nothing is trusted."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from carpool.core.typed_fields import decode_fields, shown
from carpool.jobs.untrusted_file import append_untrusted, open_untrusted, read_untrusted
from carpool.runtime.compat.libc import punch_hole
from carpool.runtime.job_state.actions import BatchSplit, MicroBatchLimit
from carpool.runtime.job_state.types import StateCopy

_SCHEMA = 1  # of cuts.jsonl and splits.jsonl
_MAX_NAME = 255  # NAME_MAX
_BLOCK_BYTES = 1 << 12  # of file systems
_MAX_RECORD_BYTES = 1 << 24  # of a file of records
_CHECKPOINT = re.compile(r"(step|mirror)-(\d{1,15})\.ckpt")

_T = TypeVar("_T", BatchSplit, MicroBatchLimit)


class JobFolder:
    """``STATE/jobs/NAME``; names that are not plain file names are percent-encoded, long ones end in a digest."""

    def __init__(self, state: Path, job: str) -> None:
        self.path = state / "jobs" / _file_name(job)
        self.checkpoints = self.path / "checkpoints"
        self._batch_splits = self.path / "cuts.jsonl"
        self._micro_batch_limits = self.path / "splits.jsonl"
        self._log: int | None = None
        self._log_start = 0  # everything before was discarded
        self.problems: list[str] = []  # problems with its files, for the job's story; the usable parts are used

    def make(self, *, resume: bool) -> None:
        """Create the folder; without ``resume``, checkpoints of an earlier run are moved aside."""
        self.path.mkdir(parents=True, exist_ok=True)
        if resume:  # rewrite the records, because a crash may have truncated the last line
            records: list[BatchSplit | MicroBatchLimit] = [*self.batch_splits(), *self.micro_batch_limits()]
            self._drop_records()
            for record in records:
                self.write(record)
            return
        self._drop_records()
        if self.checkpoints.is_dir():
            aside = next(p for n in range(1, 1 << 20) if not (p := self.path / f"checkpoints.{n}").exists())
            self.checkpoints.rename(aside)

    def log(self) -> int:
        """The descriptor of the log, to which the job's output is appended."""
        if self._log is None:
            self._log = open_untrusted(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._log

    def trim_log(self, kept_bytes: int) -> None:
        """Discard the oldest part of a log that has grown to twice the bytes to keep.

        Its space is freed in place: processes append to it all the time, and offsets of readers stay valid.
        """
        if self._log is None or not kept_bytes:
            return
        size = os.fstat(self._log).st_size
        if size - self._log_start < 2 * kept_bytes:
            return
        stop = (size - kept_bytes) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            punch_hole(self._log, self._log_start, stop)
        except OSError:  # the file system does not support holes
            os.ftruncate(self._log, 0)
            stop = 0
        if not self._log_start:
            self.problems.append(f"its log exceeds {2 * kept_bytes} bytes: the oldest part is discarded (log_bytes)")
        self._log_start = stop

    def take_problems(self) -> list[str]:
        """Problems found since the last call."""
        found, self.problems = list(dict.fromkeys(self.problems)), []
        return found

    def state_copies(self) -> list[StateCopy]:
        """The checkpoints and the copy of a mirror, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            (int(match[2]), match[1], str(path))
            for path in self.checkpoints.iterdir()
            if (match := _CHECKPOINT.fullmatch(path.name))
        ]
        return [StateCopy(step, path=path, is_mirror_file=kind == "mirror") for step, kind, path in sorted(found)]

    def open_checkpoints(self) -> int:
        """The descriptor of the folder of checkpoints, which is created if it is missing."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        return os.open(self.checkpoints, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def batch_splits(self) -> list[BatchSplit]:
        splits: list[BatchSplit] = []
        for split in self._records(self._batch_splits, BatchSplit):
            splits = [*(known for known in splits if known.step < split.step), split]
        return splits

    def micro_batch_limits(self) -> list[MicroBatchLimit]:
        return self._records(self._micro_batch_limits, MicroBatchLimit)

    def _records(self, path: Path, kind: type[_T]) -> list[_T]:
        """The records of a file; invalid lines are skipped, and the first of them is reported."""
        records: list[_T] = []
        bad: list[str] = []
        for number, line in enumerate(self._content(path).splitlines(), start=1):
            try:
                value = json.loads(line)
                records.append(decode_fields(kind, value, ignore_unknown=True))
            except (ValueError, AttributeError, RecursionError) as error:
                bad.append(f"line {number}: {shown(error)}")
        if bad:
            self.problems.append(f"{path.name}: {len(bad)} lines are unusable and were skipped; {bad[0]}")
        return records

    def _content(self, path: Path) -> bytes:
        try:
            return read_untrusted(path, _MAX_RECORD_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.problems.append(f"{path.name} cannot be read and was skipped: {error.strerror}")
            return b""

    def write(self, record: BatchSplit | MicroBatchLimit) -> None:
        path = self._batch_splits if isinstance(record, BatchSplit) else self._micro_batch_limits
        line = json.dumps({"schema": _SCHEMA, **asdict(record)}, separators=(",", ":"))
        append_untrusted(path, line.encode() + b"\n")

    def _drop_records(self) -> None:
        self._batch_splits.unlink(missing_ok=True)
        self._micro_batch_limits.unlink(missing_ok=True)

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None


def _file_name(job: str) -> str:
    name = quote(job, safe="").replace("~", "%7E")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        digest = sha256(job.encode()).hexdigest()
        name = f"{name[: _MAX_NAME - len(digest) - 1]}~{digest}"
    return name
