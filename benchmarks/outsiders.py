"""Trainings as outsiders write them: ``carpool run`` of one job alone against its plain loop.

    python benchmarks/outsiders.py                       # on one CPU core
    python benchmarks/outsiders.py --device cuda --repeat 3
    python benchmarks/outsiders.py --only gan,streaming --steps 200

For each job, alternately: a script with an ordinary loop over torch's DataLoader, and `carpool run` of a job file with
the same training. Both are timed as whole commands and without start-up. The goal: never slower than the plain loop by
more than 2 % and 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOBS = ("gpt", "convnet", "hugging_face", "two_optimizers", "gan", "actor_critic", "streaming", "augmented")

ENTRY = """
from dataclasses import replace
from carpool import Stop
from tests.support import outsider_trainings as outsiders

def job(name: str, steps: int):
    training = getattr(outsiders, name)()
    return replace(training, stop=Stop(steps=steps), evaluate=None, best="")
"""

# An ordinary loop: no line of carpool's engine, torch's own DataLoader.
PLAIN = """
import sys, time, torch
from torch.utils.data import DataLoader
from entry import job

name, steps, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
training = job(name, steps)
model = training.model.to(device)
optimizers = training.optimizer
parts = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
parts = parts if isinstance(parts, list) else [parts]
shuffle = None if training.is_stream else True
loader = DataLoader(training.dataset, training.batch_size, shuffle=shuffle, collate_fn=training.collate)

def moved(batch):
    if isinstance(batch, dict):
        return {key: moved(value) for key, value in batch.items()}
    return [moved(value) for value in batch] if isinstance(batch, (list, tuple)) else batch.to(device)

done, began = 0, time.perf_counter()
while done < steps:
    for batch in loader:
        batch = moved(batch)
        if training.step is not None:
            training.step(model, batch, optimizers)
        else:
            result = training.loss(model, batch)
            if isinstance(result, tuple):
                result = result[0] / result[1] if len(result) == 3 else result[0]
            for each in parts:
                each.zero_grad()
            result.backward()
            if training.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
            for each in parts:
                each.step()
        if training.schedule_every == "step":
            for each in training.schedules:
                each.step()
        if training.after_update:
            training.after_update(model, done)
        done += 1
        if done == steps:
            break
if device != "cpu":
    torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def timed(command: list[str], folder: Path, env: dict[str, str]) -> tuple[float, str]:
    """Wall seconds of a command, and its output."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def measure(name: str, steps: int, device: str, folder: Path) -> dict[str, float]:
    """One round: the plain loop, then carpool."""
    (folder / "entry.py").write_text(ENTRY, encoding="utf-8")
    (folder / "plain.py").write_text(PLAIN, encoding="utf-8")
    table = f'[[job]]\nname = "{name.replace("_", "-")}"\nentry = "entry.py:job"\n'
    args = f'args = {{ name = "{name}", steps = {steps} }}\n'
    (folder / "jobs.toml").write_text(table + args, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    plain_s, out = timed([sys.executable, "plain.py", name, str(steps), device], folder, env)
    devices = "cpu:1x1" if device == "cpu" else device
    carpool = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--devices", devices, "--json"]
    carpool_s, report = timed([*carpool, "--state", str(folder / "state")], folder, env)
    (job,) = json.loads(report)["jobs"]
    seconds = job["jct_s"] - job["wait_s"]
    return {"plain_s": plain_s, "plain_loop_s": float(out), "carpool_s": carpool_s, "carpool_job_s": seconds}


def main() -> None:
    """Measure the jobs and print a table, and JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=1, help="rounds; medians are printed")
    parser.add_argument("--only", default=",".join(JOBS), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'job':16} {'plain s':>9} {'loop s':>9} {'carpool s':>10} {'job s':>9} {'ratio':>7}  within 2 % + 1 s")
    for name in options.only.split(","):
        rounds = []
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(measure(name, options.steps, options.device, Path(folder)))
        found = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        is_within = found["carpool_s"] <= 1.02 * found["plain_s"] + 1.0
        results[name] = found | {"within": is_within}
        ratio = found["carpool_s"] / found["plain_s"]
        cells = f"{found['plain_s']:9.2f} {found['plain_loop_s']:9.2f} {found['carpool_s']:10.2f}"
        print(
            f"{name:16} {cells} {found['carpool_job_s']:9.2f} {ratio:7.2f}  {'yes' if is_within else 'no'}", flush=True
        )
    if options.json:
        figures = {"schema": 1, "device": options.device, "steps": options.steps, "jobs": results}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
