"""Sets of plain PyTorch scripts as a newcomer has them: ``carpool run`` without options against doing it by hand.

    python benchmarks/newcomer.py [--only sweep,slow] [--ways at_once,carpool] [--scale 0.2] [--repeats 3] [--no-save]
    CARPOOL_RESULTS=FOLDER PYTHONPATH=src python benchmarks/newcomer.py --gpu [--only vision,hurt-gpu]

Per set, in turns: the scripts one after another, all at once (``&`` in a shell), on a GPU all at once under MPS set up
by hand, as trainings of a job file, and as unmodified commands of a job file. Wall time from command to exit, and CPU
time of all processes. Other programs on the machine change wall times, above all of scripts at once.

Sets for a GPU need torchvision and transformers. Each way is printed and saved when it is done; one that fails is noted
and the next one starts. After --limit-s all processes are killed.
Limits: trainings at most 0.5 of the best by hand and 0.2 of one after another, 1.05 for two that hurt each other;
commands at most 1.0. In calls of at most ten minutes on an H200:

    1. tools/gpu_suite.py tests/runtime
    2. benchmarks/newcomer.py --gpu --only trivial-gpu,vision
    3. benchmarks/newcomer.py --gpu --only language,hurt-gpu
    4. benchmarks/newcomer.py --gpu --only mixed; benchmarks/outsiders.py --device cuda
    5. benchmarks/gpu_parking.py; benchmarks/gpu_experiments.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from measured import ROOT, save

JOBS = ROOT / "benchmarks" / "newcomer_jobs"
SETS: Mapping[str, Mapping[str, int]] = {  # steps of each job
    "trivial": {"tiny": 20},
    "alone": {"gpt": 300},
    "compute": {"gpt": 200, "cnn": 300, "lstm": 300, "gan": 1500},
    "slow": {"slow": 120, "mlp64": 2000, "mlp256": 2000},
    "hurt": {"wide": 60, "cnn": 300},
    "sweep": {f"mlp{width}": 1500 for width in (64, 128, 192, 256, 384, 512)},
}
GPU_SETS: Mapping[str, Mapping[str, int]] = {  # some 10 s of training each as a plain script on an H200
    "trivial-gpu": {"tiny": 20},
    "vision": {"resnet18": 1200, "mobilenet-v3-small": 900, "shufflenet-v2-x1-0": 700, "efficientnet-b0": 600},
    "language": {"hf-gpt2": 700, "hf-bert": 900, "own-gpt": 800, "own-lstm": 4000},
    "mixed": {
        "resnet50": 500,
        "densenet121": 300,
        "squeezenet1-1": 1500,
        "hf-bert": 700,
        "autoencoder": 3000,
        "gan-gpu": 3000,
        "own-lstm": 3000,
    },
    "hurt-gpu": {"vgg16-large": 120, "resnet50-large": 120},
}
CONTROL = "nvidia-cuda-mps-control"
Way = Callable[["Shell", Mapping[str, int]], None]


class WayFailed(Exception):
    """A command of a way failed or took too long."""


class Shell:
    """Runs commands in a folder until a point in time."""

    def __init__(self, folder: Path, ends_at: float) -> None:
        self.folder = folder
        self._ends_at = ends_at

    def run(self, commands: list[list[str]], variables: Mapping[str, str] | None = None) -> None:
        """Run commands at once, with this tree's carpool and this Python, and wait for them."""
        children = [self._start(command, variables or {}) for command in commands]
        try:
            for child in children:
                self._finish(child)
        finally:
            for child in children:
                end(child)

    def _start(self, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        modules = filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        path = {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join(programs)}
        with self._log(command).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **path, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _finish(self, child: subprocess.Popen[bytes]) -> None:
        left_s = self._ends_at - time.monotonic()
        try:
            code = child.wait(timeout=max(0.1, left_s))
        except subprocess.TimeoutExpired:
            raise WayFailed("killed at the time limit") from None
        if code:
            assert isinstance(child.args, list)
            said = self._log(child.args).read_bytes()[-1000:].decode(errors="replace")
            raise WayFailed(f"{' '.join(map(str, child.args))} ended with {code}: {said}")

    def _log(self, command: list[str]) -> Path:
        return self.folder / f"{'-'.join(command[1:3]).replace('/', '_')}.err"


def end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a command that still runs, so that it stops its own processes; then kill its session."""
    if child.poll() is not None:
        return
    for sign, patience_s in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, sign)
            child.wait(timeout=patience_s)


def script(name: str, steps: int) -> list[str]:
    """The command line of a plain script."""
    return [sys.executable, "train.py", name, str(steps)]


def in_turn(shell: Shell, jobs: Mapping[str, int]) -> None:
    """One script after another."""
    for each in jobs.items():
        shell.run([script(*each)])


def at_once(shell: Shell, jobs: Mapping[str, int]) -> None:
    """All scripts with ``&``."""
    shell.run([script(*each) for each in jobs.items()])


def at_once_under_mps(shell: Shell, jobs: Mapping[str, int]) -> None:
    """All scripts with ``&``, under an MPS daemon of our own."""
    with tempfile.TemporaryDirectory(prefix="mps") as pipes:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
        subprocess.run([CONTROL, "-d"], env={**os.environ, **variables}, check=True, timeout=30)
        try:
            shell.run([script(*each) for each in jobs.items()], variables)
        finally:
            subprocess.run([CONTROL], input=b"quit\n", env={**os.environ, **variables}, check=False, timeout=30)


def as_trainings(shell: Shell, jobs: Mapping[str, int]) -> None:
    """A job file of entries."""
    tables = [
        f'[[job]]\nname = "{name}"\nentry = "entry.py:train"\nargs = {{ name = "{name}", steps = {steps} }}\n'
        for name, steps in jobs.items()
    ]
    carpool_run(shell, tables)


def as_commands(shell: Shell, jobs: Mapping[str, int]) -> None:
    """A job file of unmodified scripts."""
    tables = [
        f'[[job]]\nname = "{name}"\ncommand = ["python", "train.py", "{name}", "{steps}"]\n'
        for name, steps in jobs.items()
    ]
    carpool_run(shell, tables)


def carpool_run(shell: Shell, tables: list[str]) -> None:
    """``carpool run`` without options."""
    (shell.folder / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
    shell.run([[sys.executable, "-m", "carpool", "run", "jobs.toml"]])


BY_HAND: Mapping[str, Way] = {
    "in_turn": in_turn,
    "at_once": at_once,
    **({"at_once_mps": at_once_under_mps} if shutil.which(CONTROL) else {}),
}
WITH_CARPOOL: Mapping[str, Way] = {"carpool": as_trainings, "carpool_commands": as_commands}


def timed(way: Way, jobs: Mapping[str, int], ends_at: float) -> tuple[float, float]:
    """Wall and CPU seconds of one way, in a folder of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file in JOBS.glob("*.py"):
            shutil.copy(file, folder)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        way(Shell(folder, ends_at), jobs)
        wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(jobs: Mapping[str, int], ways: str, repeats: int, ends_at: float) -> Iterator[dict[str, Any]]:
    """Medians of the ways so far, and ratios to the best by hand, after each way."""
    seen: dict[str, list[tuple[float, float]]] = {}
    failed: dict[str, str] = {}
    for _ in range(repeats):
        for name, way in (BY_HAND | WITH_CARPOOL).items():
            if ways and name not in ways.split(","):
                continue
            if time.monotonic() >= ends_at:
                return
            try:
                seen.setdefault(name, []).append(timed(way, jobs, ends_at))
            except (WayFailed, subprocess.SubprocessError, OSError) as error:
                failed[name] = str(error)
            yield summary({way: times for way, times in seen.items() if times}) | ({"failed": failed} if failed else {})


def summary(seen: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of wall and CPU seconds, and ratios of wall time once the ways by hand are known."""
    found: dict[str, Any] = {
        name: {
            "wall_s": round(statistics.median(wall_s for wall_s, _ in times), 2),
            "cpu_s": round(statistics.median(cpu_s for _, cpu_s in times), 2),
        }
        for name, times in seen.items()
    }
    by_hand = {name: found[name]["wall_s"] for name in BY_HAND if name in seen}
    ours = {name: found[name]["wall_s"] for name in WITH_CARPOOL if name in seen}
    if by_hand.keys() >= BY_HAND.keys() - {"in_turn"}:
        best = min(by_hand.values())
        found["of_best_by_hand"] = {name: round(wall_s / best, 3) for name, wall_s in ours.items()}
    if "in_turn" in by_hand:
        found["of_in_turn"] = {name: round(wall_s / by_hand["in_turn"], 3) for name, wall_s in ours.items()}
    return found


def main() -> None:
    """Measure the sets and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the sets for a GPU")
    parser.add_argument("--only", default="", help="names of sets, separated by commas; default: all")
    parser.add_argument("--ways", default="", help="names of ways, separated by commas; default: all")
    parser.add_argument("--limit-s", type=float, default=0.0, help="for all; default: 3600, --gpu 560")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all steps")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    sets = GPU_SETS if options.gpu else SETS
    ends_at = time.monotonic() + (options.limit_s or (560.0 if options.gpu else 3600.0))
    rows: dict[str, Any] = {"scale": options.scale, "repeats": options.repeats}
    for name in options.only.split(",") if options.only else sets:
        jobs = {job: max(1, round(options.scale * steps)) for job, steps in sets[name].items()}
        row = {"jobs": jobs, "load_before": round(os.getloadavg()[0], 1)}
        for found in measure(jobs, options.ways, options.repeats, ends_at):
            rows[name] = row | found
            print(name, found, flush=True)
            if not options.no_save:
                save("newcomer_gpu" if options.gpu else "newcomer", rows)


if __name__ == "__main__":
    main()
