"""Measures what a run costs beside its training: a trivial job as a plain script and with ``carpool run``, alternating.

python benchmarks/start_up.py [--device cuda] [--repeats 5] [--no-save]

Wall time from the command to its exit, CPU time of all processes, how often torch was imported, and when what happened
in a run. The goal is at most 1.3 times the plain script's wall time and one second more.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import measured

STEPS = 20
FACTOR, MORE_S = 1.3, 1.0  # of the goal
LIMIT_S = 300.0

SCRIPT = f"""
import sys
import torch
from torch import nn


def parts():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)), data


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    device = sys.argv[1]
    model, data = parts()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    while step < {STEPS}:
        for batch in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss(model, [each.to(device) for each in batch]).backward()
            optimizer.step()
            step += 1
            if step == {STEPS}:
                break
    torch.save(model.state_dict(), "plain.pt")
"""
JOB = f"""
import time
import torch
import plain
from carpool import Stop, Training

print("mark entry called", time.time(), flush=True)
steps = 0


def loss(model, batch):
    global steps
    steps += 1
    if steps in (1, {STEPS}):
        print("mark", "first step" if steps == 1 else "last step", time.time(), flush=True)
    return plain.loss(model, batch)


def train():
    model, data = plain.parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(
        model=model, dataset=data, loss=loss, optimizer=optimizer, batch_size=32, stop=Stop(steps={STEPS})
    )
"""
TABLE = '[[job]]\nname = "tiny"\nentry = "job.py:train"\n'
# Python imports it at every start: notes which processes begin to import torch.
SITE = """
import os, sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["START_UP_IMPORTS"], "a") as noted:
                noted.write(" ".join(sys.orig_argv) + "\\n")


sys.meta_path.insert(0, Finder())
"""
EVENTS = {  # in the executor's log
    "claimed": "executor claimed",
    "forkserver_ready": "fork server ready",
    "entries_checked": "entries checked",
    "worker_launched": "worker launched",
    "job_ended": "job ended",
}


@dataclass(slots=True)
class Timing:
    """What one command took."""

    wall_s: float
    cpu_s: float
    torch_imports: int
    timeline: dict[str, float] = field(default_factory=dict)  # seconds since the command began


def main() -> None:
    """Measure and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    given = parser.parse_args()
    plain: list[Timing] = []
    shared: list[Timing] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("plain.py", SCRIPT), ("job.py", JOB), ("jobs.toml", TABLE), ("sitecustomize.py", SITE)):
            (folder / file).write_text(text, encoding="utf-8")
        for number in range(given.repeats + 1):  # the first of each reads files into memory and is not counted
            plain.append(_timed(folder, [sys.executable, "plain.py", given.device]))
            shared.append(_run(folder, f"run-{number}", "cuda:0" if given.device == "cuda" else "cpu:1"))
            print(f"plain {_brief(plain[-1])}; carpool run {_brief(shared[-1])}", flush=True)
    row = _summary(given.device, plain[1:], shared[1:])
    _show(row)
    if not given.no_save:
        print(measured.save(f"start_up_{given.device}", row))


def _run(folder: Path, state: str, devices: str) -> Timing:
    command = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--devices", devices, "--state", state]
    began = time.time()
    timing = _timed(folder, [*command, "--log-level", "info"])
    marks = {"exit": timing.wall_s}
    for line in (folder / state / "executor.log").read_text(encoding="utf-8").splitlines():
        at, _, _, event, *_ = line.split()
        if event in EVENTS:
            marks.setdefault(EVENTS[event], datetime.fromisoformat(at).timestamp() - began)
    for line in (folder / state / "jobs" / "tiny" / "log").read_text(encoding="utf-8").splitlines():
        if line.startswith("mark "):
            _, *words, at = line.split()
            marks.setdefault(" ".join(words), float(at) - began)
    timing.timeline = dict(sorted(marks.items(), key=lambda mark: mark[1]))
    return timing


def _timed(folder: Path, command: list[str]) -> Timing:
    imports = folder / "imports"
    imports.write_text("", encoding="utf-8")
    paths = os.pathsep.join([str(measured.ROOT / "src"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "START_UP_IMPORTS": str(imports)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Timing(wall_s, cpu_s, len(imports.read_text(encoding="utf-8").splitlines()))


def _summary(device: str, plain: list[Timing], shared: list[Timing]) -> dict[str, object]:
    names = list(shared[-1].timeline)
    wall, cpu = _median(plain, "wall_s"), _median(plain, "cpu_s")
    return {
        "device": device,
        "repeats": len(plain),
        "steps": STEPS,
        "plain": {"wall_s": wall, "cpu_s": cpu},
        "carpool": {"wall_s": _median(shared, "wall_s"), "cpu_s": _median(shared, "cpu_s")},
        "wall_limit_s": FACTOR * wall + MORE_S,
        "wall_ratio": statistics.median(s.wall_s / p.wall_s for s, p in zip(shared, plain, strict=True)),
        "cpu_ratio": statistics.median(s.cpu_s / p.cpu_s for s, p in zip(shared, plain, strict=True)),
        "torch_imports": max(each.torch_imports for each in shared),
        "timeline_s": {name: statistics.median(each.timeline[name] for each in shared) for name in names},
    }


def _median(timings: list[Timing], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in timings))


def _brief(timing: Timing) -> str:
    return f"{timing.wall_s:.2f} s, {timing.cpu_s:.2f} CPU s, torch imported {timing.torch_imports} x"


def _show(row: dict[str, object]) -> None:
    for name in ("plain", "carpool", "wall_limit_s", "wall_ratio", "cpu_ratio", "torch_imports"):
        print(f"{name}: {row[name]}")
    timeline = row["timeline_s"]
    assert isinstance(timeline, dict)
    for name, at in timeline.items():
        print(f"{at:8.2f} s  {name}")


if __name__ == "__main__":
    main()
