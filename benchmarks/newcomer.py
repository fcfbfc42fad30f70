"""Sets of plain PyTorch scripts as a newcomer has them: ``carpool run`` without options against doing it by hand.

    python benchmarks/newcomer.py [--only sweep,slow] [--scale 0.2] [--repeats 3] [--no-save]

Per set, in turns: the scripts one after another, all at once (``&`` in a shell), as trainings of a job file, and as
unmodified commands of a job file. Wall time from command to exit, and CPU time of all processes. Runs on the CPU; other
programs on the machine change wall times, above all of scripts at once.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measured import ROOT, save

JOBS = ROOT / "benchmarks" / "newcomer_jobs"
LIMIT_S = 900.0
SETS: Mapping[str, Mapping[str, int]] = {  # steps of each job
    "trivial": {"tiny": 20},
    "alone": {"gpt": 300},
    "compute": {"gpt": 200, "cnn": 300, "lstm": 300, "gan": 1500},
    "slow": {"slow": 120, "mlp64": 2000, "mlp256": 2000},
    "hurt": {"wide": 60, "cnn": 300},
    "sweep": {f"mlp{width}": 1500 for width in (64, 128, 192, 256, 384, 512)},
}
Way = Callable[[Path, Mapping[str, int]], None]


def run(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command with this tree's carpool."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[bytes]) -> None:
    """Wait for a command; stop where it fails."""
    _, problem = child.communicate(timeout=LIMIT_S)
    if child.returncode:
        raise SystemExit(f"{child.args!r} ended with {child.returncode}: {problem[-2000:].decode()}")


def script(name: str, steps: int) -> list[str]:
    """The command line of a plain script."""
    return [sys.executable, "train.py", name, str(steps)]


def in_turn(folder: Path, jobs: Mapping[str, int]) -> None:
    """One script after another."""
    for each in jobs.items():
        finish(run(script(*each), folder))


def at_once(folder: Path, jobs: Mapping[str, int]) -> None:
    """All scripts with ``&``."""
    for child in [run(script(*each), folder) for each in jobs.items()]:
        finish(child)


def as_trainings(folder: Path, jobs: Mapping[str, int]) -> None:
    """A job file of entries."""
    tables = [
        f'[[job]]\nname = "{name}"\nentry = "entry.py:train"\nargs = {{ name = "{name}", steps = {steps} }}\n'
        for name, steps in jobs.items()
    ]
    carpool_run(folder, tables)


def as_commands(folder: Path, jobs: Mapping[str, int]) -> None:
    """A job file of unmodified scripts."""
    tables = [
        f'[[job]]\nname = "{name}"\ncommand = ["python", "train.py", "{name}", "{steps}"]\n'
        for name, steps in jobs.items()
    ]
    carpool_run(folder, tables)


def carpool_run(folder: Path, tables: list[str]) -> None:
    """``carpool run`` without options."""
    (folder / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
    shutil.rmtree(folder / ".carpool", ignore_errors=True)
    finish(run([sys.executable, "-m", "carpool", "run", "jobs.toml"], folder))


WAYS: Mapping[str, Way] = {
    "in_turn": in_turn,
    "at_once": at_once,
    "carpool": as_trainings,
    "carpool_commands": as_commands,
}


def timed(way: Way, jobs: Mapping[str, int]) -> tuple[float, float]:
    """Wall and CPU seconds of one way, in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in JOBS.glob("*.py"):
            shutil.copy(file, folder)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        way(folder, jobs)
        wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(jobs: Mapping[str, int], repeats: int) -> dict[str, Any]:
    """Medians of all ways, and ratios to the best by hand."""
    rounds = [{name: timed(way, jobs) for name, way in WAYS.items()} for _ in range(repeats)]
    found: dict[str, Any] = {
        name: {
            "wall_s": round(statistics.median(each[name][0] for each in rounds), 2),
            "cpu_s": round(statistics.median(each[name][1] for each in rounds), 2),
        }
        for name in WAYS
    }
    by_hand = min(found["in_turn"]["wall_s"], found["at_once"]["wall_s"])
    found["of_best_by_hand"] = {
        name: round(found[name]["wall_s"] / by_hand, 3) for name in ("carpool", "carpool_commands")
    }
    return found


def main() -> None:
    """Measure the sets and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETS), help="names of sets, separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all steps")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    rows: dict[str, Any] = {"scale": options.scale, "repeats": options.repeats}
    for name in options.only.split(","):
        jobs = {job: max(1, round(options.scale * steps)) for job, steps in SETS[name].items()}
        load = os.getloadavg()[0]
        rows[name] = {"jobs": jobs, "load_before": round(load, 1), **measure(jobs, options.repeats)}
        print(name, rows[name], flush=True)
        if not options.no_save:
            save("newcomer", rows)


if __name__ == "__main__":
    main()
