"""A job's folder on disk: its log, its checkpoints, and how its steps were cut."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from carpool.runtime.actions import Cut
from carpool.runtime.crew import Kept

_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")


class JobFolder:
    """``STATE/jobs/NAME``; names that are no plain file names are written with ``%``."""

    def __init__(self, state: Path, job: str) -> None:
        name = quote(job, safe="").replace("~", "%7E")
        if name.startswith("."):
            name = "%2E" + name[1:]
        self.path = state / "jobs" / name
        self.checkpoints = self.path / "checkpoints"
        self._cuts = self.path / "cuts.jsonl"
        self._log: int | None = None

    def make(self, *, resume: bool) -> None:
        """Make it; without ``resume``, what an earlier run left is put aside so that nothing is taken for new."""
        self.path.mkdir(parents=True, exist_ok=True)
        if resume:
            whole = self.cuts()  # a line may have been cut short by a crash
            self._cuts.unlink(missing_ok=True)
            for cut in whole:
                self.write(cut)
            return
        self._cuts.unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            aside = next(p for n in range(1, 1 << 20) if not (p := self.path / f"checkpoints.{n}").exists())
            self.checkpoints.rename(aside)

    def log(self) -> int:
        """The descriptor of the log, to which everything the job prints is appended."""
        if self._log is None:
            self._log = os.open(self.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._log

    def kept(self) -> list[Kept]:
        """The checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in self.checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))
        ]
        return [Kept(step, path=str(path)) for step, path in sorted(found)]

    def cuts(self) -> list[Cut]:
        """How steps were cut before; a line cut short by a crash is left out."""
        if not self._cuts.is_file():
            return []
        cuts: list[Cut] = []
        for line in self._cuts.read_text(encoding="utf-8").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break
            cut = Cut(value["step"], tuple(value["devices"]), tuple(value["parts"]))
            cuts = [*(known for known in cuts if known.step < cut.step), cut]
        return cuts

    def write(self, cut: Cut) -> None:
        """Keep how steps are cut from here on."""
        with self._cuts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cut), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None
