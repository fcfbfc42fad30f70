"""What switching is compared with: processes that start cold, run without switches, or stream their state in."""

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

_AT_ONCE = 4  # cold starts beside each other
_ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"}


@dataclass(frozen=True, slots=True)
class Plain:
    """A job in a process of its own, without an executor and without switches."""

    first_step_s: float  # since its interpreter was started
    digest: str


def plain(models: Sequence[str], device: str, steps: int, folder: Path, patience_s: float = 200.0) -> dict[str, Plain]:
    """Run jobs to their ends, four at a time until their first step is made; those that fail are missing."""
    ends = time.monotonic() + patience_s
    folder.mkdir()
    children: dict[str, subprocess.Popen[bytes]] = {}
    firsts: dict[str, float] = {}
    try:
        for begin in range(0, len(models), _AT_ONCE):
            few = models[begin : begin + _AT_ONCE]
            began = {}
            for model in few:
                began[model] = time.time()
                command = [sys.executable, "-m", "trials.first_step", model, device, str(steps), str(folder / model)]
                children[model] = _started(command)
            for model in few:
                if line := _line(children[model], ends):
                    firsts[model] = round(float(line) - began[model], 3)
        digests = {model: _line(children[model], ends) for model in firsts}
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return {model: Plain(firsts[model], digest) for model, digest in digests.items() if digest}


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A child whose output is not buffered here: else a line that was read ahead would be waited for in vain."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=_ENVIRONMENT)


def _line(child: subprocess.Popen[bytes], ends: float) -> str:
    """The next line that a child prints, or nothing."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], max(0.0, ends - time.monotonic()))
    return child.stdout.readline().decode().strip() if ready else ""


def streamed_ms(models: Sequence[str], device: str) -> dict[str, dict[str, Any]]:
    """The PipeSwitch-like baseline (streamed.py), all models in one process."""
    return _rows("trials.streamed", [device, *models], models)


def parked_ms(models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What it costs that a job was parked (parked.py), all models in one process."""
    return _rows("trials.parked", models, models)


def _rows(module: str, words: Sequence[str], models: Sequence[str], patience_s: float = 100.0) -> dict[str, Any]:
    """What a program prints of each model."""
    with _started([sys.executable, "-m", module, *words]) as child:
        ends = time.monotonic() + patience_s
        lines = [line for _ in models if (line := _line(child, ends)).startswith("{")]
        child.kill()
    return {row.pop("model"): row for row in map(json.loads, lines)}
