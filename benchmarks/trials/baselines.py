"""Baselines of switching: processes that start cold, run without switches, or stream their state in."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import ROOT
from trials.timed import read_losses

_ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"}


@dataclass(frozen=True, slots=True)
class Plain:
    """A job in a process of its own, without an executor and without switches."""

    first_step_s: float  # since its interpreter was started, all of them at once
    digest: str
    losses: tuple[float, ...]


def plain(models: Sequence[str], device: str, steps: int, folder: Path, patience_s: float = 60.0) -> dict[str, Plain]:
    """Run jobs to their ends, all at once; those that fail are missing."""
    ends = time.monotonic() + patience_s
    folder.mkdir()
    children: dict[str, subprocess.Popen[bytes]] = {}
    firsts: dict[str, float] = {}
    try:
        began = {}
        for model in models:
            began[model] = time.time()
            command = [sys.executable, "-m", "trials.first_step", model, device, str(steps), str(folder / model)]
            children[model] = _started(command)
        for model in models:
            if line := _line(children[model], ends):
                firsts[model] = round(float(line) - began[model], 3)
        digests = {model: _line(children[model], ends) for model in firsts}
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return {
        model: Plain(firsts[model], digest, tuple(read_losses(folder / model)))
        for model, digest in digests.items()
        if digest
    }


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A child whose output is not buffered here: else a line that was read ahead would be waited for in vain."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=_ENVIRONMENT)


def _line(child: subprocess.Popen[bytes], ends: float) -> str:
    """The next line that a child prints, or nothing."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], max(0.0, ends - time.monotonic()))
    return child.stdout.readline().decode().strip() if ready else ""


class Waiting:
    """A process that has imported everything, and prints a row for each model when it is asked."""

    def __init__(self, module: str, words: Sequence[str], models: Sequence[str]) -> None:
        self._models = models
        self._child = _started([sys.executable, "-m", module, *words, *models])

    def rows(self, patience_s: float = 100.0) -> dict[str, dict[str, Any]]:
        """What it prints of each model."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        ends = time.monotonic() + patience_s
        lines = [line for _ in self._models if (line := _line(self._child, ends)).startswith("{")]
        self.close()
        return {row.pop("model"): row for row in map(json.loads, lines)}

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.wait()


def streamed(models: Sequence[str], device: str) -> Waiting:
    """The PipeSwitch-like baseline (streamed.py), all models in one process."""
    return Waiting("trials.streamed", [device], models)


def parked_ms(models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What it costs that a job was parked (parked.py), all models in one process."""
    return Waiting("trials.parked", [], models).rows()
