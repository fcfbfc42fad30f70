"""Job folder on disk: log, checkpoints, and the recorded batch splits."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from carpool.runtime.job_state.actions import BatchSplit, MicroBatchLimit
from carpool.runtime.job_state.types import StateCopy

_SCHEMA = 1  # of cuts.jsonl and splits.jsonl
_MAX_NAME = 255  # NAME_MAX
_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


class JobFolder:
    """``STATE/jobs/NAME``; names that are not plain file names are percent-encoded, long ones end in a digest."""

    def __init__(self, state: Path, job: str) -> None:
        self.path = state / "jobs" / _file_name(job)
        self.checkpoints = self.path / "checkpoints"
        self._batch_splits = self.path / "cuts.jsonl"
        self._micro_batch_limits = self.path / "splits.jsonl"
        self._log: int | None = None

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
            self._log = os.open(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._log

    def state_copies(self) -> list[StateCopy]:
        """The checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in self.checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
        ]
        return [StateCopy(step, path=str(path)) for step, path in sorted(found)]

    def batch_splits(self) -> list[BatchSplit]:
        splits: list[BatchSplit] = []
        for value in _lines(self._batch_splits):
            split = BatchSplit(value["step"], tuple(value["devices"]), tuple(value["parts"]))
            splits = [*(known for known in splits if known.step < split.step), split]
        return splits

    def micro_batch_limits(self) -> list[MicroBatchLimit]:
        return [MicroBatchLimit(value["step"], value["samples"]) for value in _lines(self._micro_batch_limits)]

    def write(self, record: BatchSplit | MicroBatchLimit) -> None:
        path = self._batch_splits if isinstance(record, BatchSplit) else self._micro_batch_limits
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema": _SCHEMA, **asdict(record)}, separators=(",", ":")) + "\n")

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


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON values of a file, one a line, up to a truncated one."""
    values: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values
