"""Compares successive halving with the whole grid: steps taken, and whether it finds the grid's best trial.

python benchmarks/halving.py [--seeds 3] [--devices cpu:2]

A sweep of 16 small classifiers (8 learning rates, 2 widths) on data with label noise, once to the end and once with
`halving`. `found`: the best trial of halving is within one standard error of the grid's best accuracy on the held-out
samples; `same`: it is the very same trial. Finished trials must have the bits that they have in the grid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured

STEPS = 1080
HELD_OUT = 10_000  # samples: a standard error of at most half a percentage point
RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
WIDTHS = (8, 64)
HALVING = 'halving = { metric = "val_acc", mode = "max", eta = 3, min_steps = 120 }'

ENTRY = f"""
import torch
from torch import nn
from carpool import Stop, Training


def samples(count, seed, task):
    chance = torch.Generator().manual_seed(1000 * task + seed)
    inputs = torch.randn(count, 16, generator=chance)
    rule = torch.Generator().manual_seed(task)
    hidden = torch.tanh(inputs @ torch.randn(16, 12, generator=rule))
    scores = hidden @ torch.randn(12, 4, generator=rule)
    return inputs, (scores + 0.2 * torch.randn(count, 4, generator=chance)).argmax(1)


def classifier(lr, width, task):
    inputs, labels = samples(2000, 1, task)
    held_out, answers = samples({HELD_OUT}, 2, task)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model):
        return {{"val_acc": (model(held_out).argmax(1) == answers).float().mean().item()}}

    return Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        dataset=torch.utils.data.TensorDataset(inputs, labels),
        loss=loss,
        batch_size=50,
        stop=Stop(steps={STEPS}),
        evaluate=evaluate,
    )
"""


def main() -> None:
    """Run grid and halving for each seed, and print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", default="cpu:2")
    options = parser.parse_args()
    rows = []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(Path(folder), seed, options.devices))
        print(describe(rows[-1]), flush=True)
        print(measured.save("halving", {"devices": options.devices, "steps": STEPS, "rule": HALVING, "seeds": rows}))


def compare(folder: Path, seed: int, devices: str) -> dict[str, Any]:
    """The grid and the halved sweep of one seed."""
    (folder / "train.py").write_text(ENTRY, encoding="utf-8")
    grid, halved = (run_sweep(folder, seed, devices, rule) for rule in ("", HALVING))
    final = {job["name"]: job for job in grid["jobs"]}
    best = max(final.values(), key=accuracy)
    finished = [job for job in halved["jobs"] if job["state"] == "finished"]
    chosen = max(finished, key=accuracy)
    top = sorted(map(accuracy, final.values()), reverse=True)
    return {
        "seed": seed,
        "trials": len(final),
        "grid_steps": steps(grid),
        "halving_steps": steps(halved),
        "fraction": steps(halved) / steps(grid),
        "grid_best": {"params": best["params"], "val_acc": accuracy(best)},
        "halving_best": {"params": chosen["params"], "val_acc": accuracy(chosen)},
        "found": accuracy(chosen) >= accuracy(best) - standard_error(accuracy(best)),
        "same": chosen["name"] == best["name"],
        "grid_median": statistics.median(top),
        "grid_second": top[1],
        "equal_bits": all(job["digest"] == final[job["name"]]["digest"] for job in finished),
        "grid_s": grid["makespan_s"],
        "halving_s": halved["makespan_s"],
    }


def run_sweep(folder: Path, seed: int, devices: str, rule: str) -> dict[str, Any]:
    """The document of one run."""
    name = "halved" if rule else "grid"
    table = f"""
[[job]]
name = "net"
entry = "train.py:classifier"
args = {{ task = {seed} }}
seed = {seed}
[job.sweep]
lr = {list(RATES)}
width = {list(WIDTHS)}
{rule}
"""
    (folder / f"{name}.toml").write_text(table, encoding="utf-8")
    command = [sys.executable, "-m", "carpool", "run", f"{name}.toml", "--devices", devices, "--no-check", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def steps(document: dict[str, Any]) -> int:
    """Steps of all trials of a run."""
    return sum(job["steps"] for job in document["jobs"])


def accuracy(job: dict[str, Any]) -> float:
    """A trial's accuracy on held-out samples at its end."""
    return float(job["metrics"]["val_acc"])


def standard_error(fraction: float) -> float:
    """The standard error of a fraction of the held-out samples."""
    return math.sqrt(fraction * (1 - fraction) / HELD_OUT)


def describe(row: dict[str, Any]) -> str:
    """One line about a seed."""
    grid, halved = row["grid_best"], row["halving_best"]
    return (
        f"seed {row['seed']}: {row['fraction']:.1%} of the grid's steps; best {halved['params']} "
        f"{halved['val_acc']:.4f}, the grid's {grid['params']} {grid['val_acc']:.4f}; found: {row['found']}; "
        f"same trial: {row['same']}; equal bits: {row['equal_bits']}"
    )


if __name__ == "__main__":
    main()
