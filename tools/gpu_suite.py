"""Run the tests that need torch on a GPU machine, without pytest-xdist, and write a summary as JSON.

Usage: python3 tools/gpu_suite.py [--lanes N] [--limit SECONDS] [--out FILE] [PATH …]

Uses the interpreter that runs it, so that another version of torch than the pinned one can be tested. One lane runs the
tests marked ``gpu`` file by file; the other lanes run all other tests, one process per file, without seeing the GPU.
What the limit cuts off is listed as unfinished. Packages that the machine lacks are found in ``.work/site``:

    pip install --target .work/site --no-deps pytest pluggy iniconfig hypothesis sortedcontainers nvidia-ml-py

The summary goes to FILE, else to ``gpu_suite.json`` in the folder that OUT names, else here; the output of test files
with failures to the same name with ``.log``. Exit code 0: all passed; 1: not all;
2: a package is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / ".work" / "site"
FOLDERS = ("tests/runtime", "tests/benchmarks", "tests/jobs", "tests/testing", "tests/backends")
NEEDED = ("pytest", "hypothesis", "torch", "numpy", "scipy", "scikit-learn", "click", "rich", "nvidia-ml-py")
REQUIRED = ("pytest", "hypothesis", "torch")  # without these no test starts
LIMIT_S = 530.0
NO_TESTS = 5  # pytest's exit code where a file has none of the wanted tests


@dataclass
class Summary:
    """What a run found."""

    versions: dict[str, str]
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # first line of each message, by test
    unfinished: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)  # by file
    wall_s: float = 0.0

    def add(self, report: Path) -> None:
        for case in ET.parse(report).getroot().iter("testcase"):
            problem = next((each for each in case if each.tag in {"failure", "error"}), None)
            if problem is not None:
                self.failed += 1
                name = f"{case.get('classname')}::{case.get('name')}"
                self.failures[name] = (problem.get("message") or "").partition("\n")[0]
            elif case.find("skipped") is not None:
                self.skipped += 1
            else:
                self.passed += 1


class Suite:
    """Runs test files in lanes until all are done or time is up."""

    def __init__(self, files: Sequence[Path], lanes: int, limit_s: float) -> None:
        self.summary = Summary(versions())
        self.failure_logs: list[Path] = []
        self._deadline = time.monotonic() + limit_s
        self._folder = Path(tempfile.mkdtemp(prefix="gpu_suite."))
        self._lock = threading.Lock()
        self._times: dict[str, float] = {}
        on_gpu = [path for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
        shared = _queued(files)
        self._lanes = [
            threading.Thread(target=self._work, args=(_queued(on_gpu), "gpu")),
            *[threading.Thread(target=self._work, args=(shared, "not gpu")) for _ in range(lanes)],
        ]

    def run(self) -> Summary:
        began = time.monotonic()
        for lane in self._lanes:
            lane.start()
        for lane in self._lanes:
            lane.join()
        self.summary.wall_s = round(time.monotonic() - began, 1)
        slowest = sorted(self._times.items(), key=lambda item: -item[1])[:10]
        self.summary.slowest_s = {name: round(seconds, 1) for name, seconds in slowest}
        return self.summary

    def _work(self, files: queue.SimpleQueue[Path], marks: str) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._test(files.get_nowait(), marks)

    def _test(self, path: Path, marks: str) -> None:
        name = f"{path.relative_to(ROOT)} ({marks})"
        log = self._folder / f"{name.replace('/', '.')}.log"
        report = log.with_suffix(".xml")
        began = time.monotonic()
        code = _run(_command(path, marks, report), _environment(marks), log, self._deadline - began)
        with self._lock:
            self._times[name] = time.monotonic() - began
            if code not in {0, NO_TESTS}:
                self.failure_logs.append(log)
            if code is None:
                self.summary.unfinished.append(name)
            elif report.exists():
                self.summary.add(report)
            else:
                self.summary.failed += 1
                self.summary.failures[name] = f"pytest ended with exit code {code} and no report"


def _queued(files: Sequence[Path]) -> queue.SimpleQueue[Path]:
    """The largest files first: they tend to take longest."""
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for path in sorted(files, key=lambda path: -path.stat().st_size):
        waiting.put(path)
    return waiting


def _command(path: Path, marks: str, report: Path) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-m", f"{marks} and not slow", f"--junitxml={report}"]
    return [sys.executable, "-m", "pytest", *options, str(path)]


def _environment(marks: str) -> dict[str, str]:
    hidden = {} if marks == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT / "src"), str(SITE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **hidden, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Return the exit code; None where the limit was reached, and the processes were killed."""
    with log.open("wb") as output:
        if limit_s <= 0:
            return None
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def versions() -> dict[str, str]:
    """Of Python and of what the tests need; empty where it is missing."""
    sys.path.insert(0, str(SITE))
    found = {"python": platform.python_version()}
    for name in NEEDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    return found


def find_tests(paths: Sequence[str]) -> list[Path]:
    """The test files among these files, and below these folders."""
    found: list[Path] = []
    for path in (ROOT / each for each in paths):
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


def main() -> int:
    """Run, print and write the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=FOLDERS, metavar="PATH", help="test files and folders")
    parser.add_argument(
        "--lanes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes beside the GPU's"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="kill what runs longer")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_suite.json", metavar="FILE")
    options = parser.parse_args()
    if missing := [name for name in REQUIRED if not versions()[name]]:
        print(f"not installed: {', '.join(missing)}. Install into {SITE} (see the head of this file).", file=sys.stderr)
        return 2
    suite = Suite(find_tests(options.paths), options.lanes, options.limit)
    summary = suite.run()
    logs = [f"== {log.stem}\n{log.read_text(encoding='utf-8', errors='replace')}" for log in suite.failure_logs]
    options.out.with_suffix(".log").write_text("\n".join(logs), encoding="utf-8")
    text = json.dumps({"schema": 1, **asdict(summary)}, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if summary.failed or summary.unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
