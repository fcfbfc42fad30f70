"""Compares successive halving with the whole grid: steps taken, and whether it finds the grid's best trial.

python benchmarks/halving.py [--seeds 3] [--devices cpu:2]

A sweep of 16 small classifiers (8 learning rates, 2 widths), once to the end and once with `halving`, on two tasks:
handwritten `digits`, and `noisy` labels, where the best trials change ranks until the end. `found`: the best trial of
halving is within one standard error of the grid's best accuracy on the held-out samples; `same`: it is the very same
trial. Finished trials must have the bits that they have in the grid.
"""

from __future__ import annotations

import argparse
import itertools
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
HELD_OUT = {"digits": 797, "noisy": 10_000}  # samples
RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
WIDTHS = (8, 64)
HALVING = 'halving = { metric = "val_acc", mode = "max", eta = 3, min_steps = 120 }'

ENTRY = f"""
import torch
from torch import nn
from carpool import Stop, Training


def digits(seed):
    from sklearn.datasets import load_digits

    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pixels, labels = pixels[order].float() / 16, labels[order]
    return pixels[:1000], labels[:1000], pixels[1000:], labels[1000:]


def noisy(seed):
    chance, rule = torch.Generator().manual_seed(1000 * seed), torch.Generator().manual_seed(seed)
    inputs = torch.randn(12_000, 16, generator=chance)
    hidden = torch.tanh(inputs @ torch.randn(16, 12, generator=rule))
    scores = hidden @ torch.randn(12, 4, generator=rule)
    labels = (scores + 0.2 * torch.randn(12_000, 4, generator=chance)).argmax(1)
    return inputs[:2000], labels[:2000], inputs[2000:], labels[2000:]


def classifier(lr, width, task, task_seed):
    inputs, labels, held_out, answers = {{"digits": digits, "noisy": noisy}}[task](task_seed)
    model = nn.Sequential(nn.Linear(inputs.shape[1], width), nn.ReLU(), nn.Linear(width, int(labels.max()) + 1))

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
    for task, seed in itertools.product(HELD_OUT, range(1, options.seeds + 1)):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(Path(folder), task, seed, options.devices))
        print(describe(rows[-1]), flush=True)
        measured.save("halving", {"devices": options.devices, "steps": STEPS, "rule": HALVING, "rows": rows})


def compare(folder: Path, task: str, seed: int, devices: str) -> dict[str, Any]:
    """The grid and the halved sweep of one task and seed."""
    (folder / "train.py").write_text(ENTRY, encoding="utf-8")
    grid, halved = (run_sweep(folder, task, seed, devices, rule) for rule in ("", HALVING))
    final = {job["name"]: job for job in grid["jobs"]}
    best = max(final.values(), key=accuracy)
    finished = [job for job in halved["jobs"] if job["state"] == "finished"]
    chosen = max(finished, key=accuracy)
    top = sorted(map(accuracy, final.values()), reverse=True)
    return {
        "task": task,
        "seed": seed,
        "trials": len(final),
        "grid_steps": steps(grid),
        "halving_steps": steps(halved),
        "fraction": steps(halved) / steps(grid),
        "grid_best": {"params": best["params"], "val_acc": accuracy(best)},
        "halving_best": {"params": chosen["params"], "val_acc": accuracy(chosen)},
        "found": accuracy(chosen) >= accuracy(best) - standard_error(accuracy(best), HELD_OUT[task]),
        "same": chosen["name"] == best["name"],
        "grid_median": statistics.median(top),
        "grid_second": top[1],
        "equal_bits": all(job["digest"] == final[job["name"]]["digest"] for job in finished),
        "grid_s": grid["makespan_s"],
        "halving_s": halved["makespan_s"],
    }


def run_sweep(folder: Path, task: str, seed: int, devices: str, rule: str) -> dict[str, Any]:
    """The document of one run."""
    name = "halved" if rule else "grid"
    table = f"""
[[job]]
name = "net"
entry = "train.py:classifier"
args = {{ task = "{task}", task_seed = {seed} }}
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


def standard_error(fraction: float, count: int) -> float:
    """The standard error of a fraction of so many samples."""
    return math.sqrt(fraction * (1 - fraction) / count)


def describe(row: dict[str, Any]) -> str:
    """One line about a seed."""
    grid, halved = row["grid_best"], row["halving_best"]
    return (
        f"{row['task']}, seed {row['seed']}: {row['fraction']:.1%} of the grid's steps; best {halved['params']} "
        f"{halved['val_acc']:.4f}, the grid's {grid['params']} {grid['val_acc']:.4f}; found: {row['found']}; "
        f"same trial: {row['same']}; equal bits: {row['equal_bits']}"
    )


if __name__ == "__main__":
    main()
