"""Live run: equal trainings with different weights on a CPU device of one core and one of two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured import ROOT

DEVICES = "cpu:1x1,1x2"
WEIGHTS = {"light": 1.0, "middling": 2.0, "heavy": 4.0, "heaviest": 5.0}  # in order of submission: the wrong one

_ENTRY = """
import torch, carpool


def mlp() -> carpool.Training:
    data = carpool.datasets.digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data.train,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=64,
        stop=carpool.Stop(epochs=15),
    )
"""


def live(policy: str = "hare", times: int = 1) -> dict[str, Any]:
    """Run, print who ended when, and return the figures: those of the last run, with what the others learned."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_ENTRY, encoding="utf-8")
        tables = [
            f'[[job]]\nname = "{job}"\nentry = "train.py:mlp"\nweight = {weight}\n' for job, weight in WEIGHTS.items()
        ]
        (folder / "jobs.toml").write_text("\n".join(tables), encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--policy", policy, "--json"]
        command += ["--devices", DEVICES, "--oversubscribe"]
        env, pipe = {**os.environ, "PYTHONPATH": str(ROOT / "src")}, subprocess.PIPE
        told = ""
        for _ in range(times):
            done = subprocess.run(command, stdout=pipe, text=True, env=env, cwd=folder, timeout=180.0, check=True)
            told = done.stdout
    found = json.loads(told)
    jobs = {job["name"]: job for job in found["jobs"]}
    starts = {name: job["allocations"][0]["at_s"] for name, job in jobs.items()}
    print(f"\nlive on {DEVICES} under {policy}, run {times}: weighted JCT {found['weighted_jct_s']:.1f} s")
    for job, weight in WEIGHTS.items():
        begun, held = starts[job], ", ".join(jobs[job]["allocations"][0]["devices"])
        ended = f"{jobs[job]['state']} at {jobs[job]['jct_s']:6.2f} s"
        print(f"  {job:10} weight {weight:g}  from {begun:6.2f} s on {held}, {ended}")
    return {
        "policy": policy,
        "run": times,
        "devices": DEVICES,
        "overlap": len(os.sched_getaffinity(0)) < 3,  # the devices share a core
        "weighted_jct_s": found["weighted_jct_s"],
        "jobs": [
            {
                "name": job,
                "weight": weight,
                "state": jobs[job]["state"],
                "start_s": starts[job],
                "jct_s": jobs[job]["jct_s"],
            }
            for job, weight in WEIGHTS.items()
        ],
        "in_order": max(starts["heavy"], starts["heaviest"]) < min(starts["light"], starts["middling"]),
        "finished": all(job["state"] == "finished" for job in found["jobs"]),
    }
