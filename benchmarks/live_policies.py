"""Runs policies on real jobs of this machine: weights on heterogeneous devices, and tuned batch sizes.

Usage: python benchmarks/live_policies.py [--repeats N] [--only weighted|tuned]

Weights: four equal trainings of different weights, submitted in the wrong order, on a device of one core and one of
two; once without estimates, and once with those of the first run. Batches: two trainings on handwritten digits share a
core, or run sequentially, and end at 95 % test accuracy; with fixed batch sizes, and tuned by measured gradient noise.
Policies re-plan more often than by default, because trainings take half a minute. JSON after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from grounds.hare_live import live
from measured import ROOT, save

ENTRY = ROOT / "benchmarks" / "trials" / "aimed.py"
WEIGHTED = ("carpool", "hare", "wsrtf", "fifo")
BATCHES = (  # whether jobs allow it, and the policy
    ("as written", False, "carpool:interval_s=2"),
    ("tuned", True, "carpool:interval_s=2"),
    ("as written", False, "iadeep:settle_s=0.5"),
    ("tuned", True, "iadeep:settle_s=0.5"),
)
GOAL, RATE = 0.95, 0.005


def tune(policy: str, batch: int, *, tuned: bool = True) -> dict[str, Any]:
    """Two jobs on one core to their target; who ended when, with which batches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            f'[[job]]\nname = "{job}"\nentry = "{ENTRY}:digits"\nseed = {seed}\n'
            f"args = {{ goal = {GOAL}, lr = {RATE} }}\n"
            f"batch = {{ size = {batch}{', tune = true, min = 4, max = 512' if tuned else ''} }}\n"
            for seed, job in enumerate(("one", "two"))
        ]
        (folder / "jobs.toml").write_text("\n".join(rows), encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", str(folder / "jobs.toml"), "--policy", policy, "--json"]
        command += ["--devices", "cpu:1x1", "--state", str(folder / "state")]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=400.0, check=True).stdout
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


def told(found: dict[str, Any]) -> str:
    """A row in words."""
    reached = all(job["accuracy"] >= GOAL for job in found["jobs"])
    last = "/".join(str(job["batches"][-1] or found["own"]) for job in found["jobs"])
    steps = "/".join(str(job["steps"]) for job in found["jobs"])
    return (
        f"  own batch {found['own']:3} {found['batches']:10} {found['policy']:20} after {found['avg_jct_s']:6.2f} s on "
        f"average, {steps} steps, target {'reached' if reached else 'MISSED'}, batches at the end {last}"
    )


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("weighted", "tuned"), default="")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"weighted": [], "tuned": []}
    if options.only != "tuned":
        for policy, times in product(WEIGHTED, (1, 2)):
            for _ in range(options.repeats):
                results["weighted"].append(live(policy, times))
                save("live_policies", results)
    if options.only != "weighted":
        print(f"\ntwo trainings to {GOAL:.0%} on one core")
        for batch, (name, tuned, policy) in product((8, 64), BATCHES):
            for _ in range(options.repeats):
                found = {"batches": name, **tune(policy, batch, tuned=tuned)}
                results["tuned"].append(found)
                print(told(found), flush=True)
                save("live_policies", results)
    print(f"wrote {save('live_policies', results)}")


if __name__ == "__main__":
    main()
