"""Common parts of benchmarks: measured child processes, and result files with machine, versions and commit."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tests.support
RESULTS = Path(os.environ.get("CARPOOL_RESULTS") or ROOT / "benchmarks" / "results")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one child process took, start-up included."""

    stdout: str
    cpu_s: float
    wall_s: float
    peak_bytes: int


def carpool(*args: str, timeout_s: float = 900.0) -> Usage:
    """Run the command line in a process of its own, on one core."""
    command = [sys.executable, "-m", "carpool", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
    guard = threading.Timer(timeout_s, child.kill)
    guard.start()
    stdout = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)  # the usage of this child alone
    guard.cancel()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    wall_s = time.perf_counter() - started
    return Usage(stdout, used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss * 1024)


class Patience:
    """How long a benchmark may go on starting things: what it has seen by then is what it reports."""

    def __init__(self, limit_s: float) -> None:
        self._ends = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        """Whether nothing new should be started."""
        return time.monotonic() >= self._ends


def save(name: str, results: Any) -> Path:
    """Write results beside the machine, the versions and the commit they were measured with.

    Called after every row, so that a run that is cut short leaves what it saw.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "benchmark": name, **conditions(), "results": results}
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
    return path


@functools.cache
def conditions() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "scipy", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _commit()
    note = (
        {"commit_note": "measured with uncommitted changes on top of this commit"} if commit.endswith("-dirty") else {}
    )
    return {"machine": _processor(), "cores": os.cpu_count(), "versions": versions, "commit": commit, **note}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The measured commit: CARPOOL_COMMIT where set (for copies of the tree without git), else git's."""
    if given := os.environ.get("CARPOOL_COMMIT"):
        return given
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "examples", ":(glob)benchmarks/**/*.py")
    return f"{head}-dirty" if head and changed else head or "unknown"


def _git(*args: str) -> str:
    found = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()
