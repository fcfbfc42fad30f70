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

_SCHEMA = 1  # of lines about cuts and splits
_LONGEST = 255  # characters of a file's name (NAME_MAX)
_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


class JobFolder:
    """``STATE/jobs/NAME``; names that are no plain file names are written with ``%``, and long ones end in a digest."""

    def __init__(self, state: Path, job: str) -> None:
        self.path = state / "jobs" / _file_name(job)
        self.checkpoints = self.path / "checkpoints"
        self._cuts = self.path / "cuts.jsonl"
        self._splits = self.path / "splits.jsonl"
        self._log: int | None = None

    def make(self, *, resume: bool) -> None:
        """Make it; without ``resume``, what an earlier run left is put aside so that nothing is taken for new."""
        self.path.mkdir(parents=True, exist_ok=True)
        if resume:
            whole: list[BatchSplit | MicroBatchLimit] = [
                *self.cuts(),
                *self.splits(),
            ]  # a line may have been cut short by a crash
            self._forget()
            for known in whole:
                self.write(known)
            return
        self._forget()
        if self.checkpoints.is_dir():
            aside = next(p for n in range(1, 1 << 20) if not (p := self.path / f"checkpoints.{n}").exists())
            self.checkpoints.rename(aside)

    def log(self) -> int:
        """The descriptor of the log, to which everything the job prints is appended."""
        if self._log is None:
            self._log = os.open(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._log

    def kept(self) -> list[StateCopy]:
        """The checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in self.checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
        ]
        return [StateCopy(step, path=str(path)) for step, path in sorted(found)]

    def cuts(self) -> list[BatchSplit]:
        """How steps were cut before; a line cut short by a crash is left out."""
        cuts: list[BatchSplit] = []
        for value in _lines(self._cuts):
            cut = BatchSplit(value["step"], tuple(value["devices"]), tuple(value["parts"]))
            cuts = [*(known for known in cuts if known.step < cut.step), cut]
        return cuts

    def splits(self) -> list[MicroBatchLimit]:
        """How steps were split before, because memory ran out."""
        return [MicroBatchLimit(value["step"], value["samples"]) for value in _lines(self._splits)]

    def write(self, what: BatchSplit | MicroBatchLimit) -> None:
        """Keep how steps are cut or split from here on."""
        path = self._cuts if isinstance(what, BatchSplit) else self._splits
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema": _SCHEMA, **asdict(what)}, separators=(",", ":")) + "\n")

    def _forget(self) -> None:
        self._cuts.unlink(missing_ok=True)
        self._splits.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None


def _file_name(job: str) -> str:
    """A name that a file can have; two jobs never have the same one."""
    name = quote(job, safe="").replace("~", "%7E")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST:
        digest = sha256(job.encode()).hexdigest()
        name = f"{name[: _LONGEST - len(digest) - 1]}~{digest}"
    return name


def _lines(path: Path) -> list[dict[str, Any]]:
    """The values in a file of one a line, up to one that was cut short."""
    values: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values
