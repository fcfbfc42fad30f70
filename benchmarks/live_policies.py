"""Policies on real jobs of this machine: weights on unlike devices, and batch sizes tuned while jobs run.

Usage: python benchmarks/live_policies.py [--repeats N]
Weights: four equal trainings of unlike weights, submitted in the wrong order, on a device of one core and one of two;
once with nothing known, and once more with what the first run has learned.
Batches: two trainings on handwritten digits share a core and end at 95 % of the test images; with the batch sizes of
their authors, and tuned by samples per second times what they teach, from the gradient noise measured meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grounds.hare_live import live
from measured import ROOT, save

ENTRY = ROOT / "benchmarks" / "trials" / "aimed.py"
WEIGHTED = ("hare", "wsrtf", "fifo")
BATCHES = {"as written": "iadeep:tuner=false", "tuned": "iadeep:settle_s=0.5"}
GOAL = 0.95


def tune(policy: str, batch: int) -> dict[str, Any]:
    """Two jobs on one core to their target; who ended when, with which batches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            f'[[job]]\nname = "{job}"\nentry = "{ENTRY}:digits"\nargs = {{ goal = {GOAL} }}\nseed = {seed}\n'
            f"batch = {{ size = {batch}, tune = true, min = 4, max = 512 }}\n"
            for seed, job in enumerate(("one", "two"))
        ]
        (folder / "jobs.toml").write_text("\n".join(rows), encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", str(folder / "jobs.toml"), "--policy", policy, "--json"]
        command += ["--devices", "cpu:1x1", "--state", str(folder / "state")]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=240.0, check=True).stdout
    found = json.loads(told)
    jobs = [
        {
            "name": job["name"],
            "jct_s": job["jct_s"],
            "steps": job["steps"],
            "accuracy": job["metrics"]["accuracy"],
            "batches": [given["batch_size"] for given in job["allocations"]],
        }
        for job in found["jobs"]
    ]
    return {"policy": policy, "own": batch, "avg_jct_s": found["avg_jct_s"], "jobs": jobs}


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    weighted = [live(policy, times) for policy in WEIGHTED for times in (1, 2) for _ in range(options.repeats)]
    tuned = []
    print(f"\ntwo trainings to {GOAL:.0%} on one core")
    for batch in (8, 64):
        for name, policy in BATCHES.items():
            for _ in range(options.repeats):
                found = {"batches": name, **tune(policy, batch)}
                tuned.append(found)
                reached = all(job["accuracy"] >= GOAL for job in found["jobs"])
                last = "/".join(str(job["batches"][-1] or batch) for job in found["jobs"])
                told = f"after {found['avg_jct_s']:6.2f} s on average, target {'reached' if reached else 'MISSED'}"
                print(f"  own batch {batch:3} {name:10} {told}, batches at the end {last}", flush=True)
    print(f"wrote {save('live_policies', {'weighted': weighted, 'tuned': tuned})}")


if __name__ == "__main__":
    main()
