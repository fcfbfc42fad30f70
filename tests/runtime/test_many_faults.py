"""Random faults over several jobs: all end with the weights of a run without faults, and nothing leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_random_faults_change_nothing_and_leak_nothing() -> None:
    """A small run of the benchmark, which exits with 1 if anything does not hold."""
    script = [sys.executable, str(ROOT / "benchmarks" / "runtime_faults.py"), "--no-save", "--forkserver-every", "0"]
    settings = ["--jobs", "3", "--faults", "12", "--steps", "24", "--pause", "0.01", "--hang", "2", "--seed", "7"]
    ended = subprocess.run([*script, *settings], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 of 3 jobs ended with the same weights" in ended.stdout
