"""Runs five experiments on one GPU through ``carpool run``: sequentially, and shared by several policies.

Usage: PYTHONPATH=src python benchmarks/gpu_experiments.py [--policies fifo,carpool,competitive] [--seconds 5]

CIFAR-10 shapes, batch 128: VGG16, two ResNet18 with different learning rates, MobileNetV3 and ShuffleNetV2, each for
about ``--seconds`` alone. Every row starts cold, without processes or known rates, and the clock runs from the
submission. Every job replays CUDA graphs in every row, so rows differ by sharing alone. `--devices cpu:1x1 --seconds
0.02` tries it without a GPU. JSON after each row.
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

from measured import ROOT, save
from zoo import ENTRIES

STEPS_PER_S = {  # about, alone as a graph on an H200: only says how long the trainings are
    "vgg": ("vgg16", 0.01, 200),
    "residual": ("resnet18", 0.01, 500),
    "residual-slow": ("resnet18", 0.001, 500),
    "mobile": ("mobilenet_v3", 0.01, 300),
    "shuffle": ("shufflenet_v2", 0.01, 350),
}
LIMIT_S = 120.0


def job_file(seconds: float, batch: int) -> str:
    """The five experiments."""
    tables = ['[defaults]\nprecision = "tf32"\nchannels_last = true\n']
    for name, (model, lr, rate) in STEPS_PER_S.items():
        steps = max(3, round(seconds * rate))
        args = f"{{ batch_size = {batch}, steps = {steps}, lr = {lr} }}"
        tables.append(f'[[job]]\nname = "{name}"\nentry = "{ENTRIES}:{model}"\nargs = {args}\n')
    return "\n".join(tables)


def row(policy: str, jobs: str, devices: str) -> dict[str, Any]:
    """One run of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "jobs.toml").write_text(jobs, encoding="utf-8")
        command = [sys.executable, "-m", "carpool", "run", "jobs.toml", "--policy", policy, "--devices", devices]
        command += ["--state", "state", "--json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=work, timeout=LIMIT_S, check=False, process_group=0
        )
        kept = {path.parent.name: path.parent for path in (work / "state").rglob("story.jsonl")}
        stories = {job: _rows(folder / "story.jsonl") for job, folder in kept.items()}
        curves = {job: _curve(folder / "metrics.jsonl") for job, folder in kept.items()}
    if done.returncode:
        return {"policy": policy, "error": done.stderr[-500:]}
    found = json.loads(done.stdout)
    jcts = {job["name"]: job["jct_s"] for job in found["jobs"]}
    return {
        "policy": policy,
        "makespan_s": found["makespan_s"],
        "mean_jct_s": round(sum(jcts.values()) / len(jcts), 3),
        "jct_s": jcts,
        "digests": {job["name"]: job["digest"] for job in found["jobs"]},
        "allocations": {job["name"]: job["allocations"] for job in found["jobs"]},
        "stories": {job: [[row["at_s"], row["what"]] for row in rows] for job, rows in stories.items()},
        "curves": curves,  # by time: steps, steps/s
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _curve(path: Path) -> list[list[float]]:
    rows = [row for row in _rows(path) if "steps_per_s" in row]
    return [[round(row.get(key, 0.0), 2) for key in ("at_s", "step", "steps_per_s")] for row in rows]


def main() -> None:
    """Row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="fifo,carpool,competitive")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each training takes alone, about")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--devices", default="cuda")
    options = parser.parse_args()
    jobs = job_file(options.seconds, options.batch)
    rows: list[dict[str, Any]] = []
    for policy in options.policies.split(","):
        try:
            rows.append(row(policy, jobs, options.devices))
        except subprocess.TimeoutExpired as error:
            rows.append({"policy": policy, "error": str(error)[:300]})
        new = rows[-1]
        if "error" in new:
            print(f"{policy:14} {new['error']}", flush=True)
        else:
            each = "  ".join(f"{name} {jct:.1f}" for name, jct in new["jct_s"].items())
            print(
                f"{policy:14} makespan {new['makespan_s']:6.2f} s  mean {new['mean_jct_s']:6.2f} s  {each}", flush=True
            )
        save("gpu_experiments" if "cuda" in options.devices else "experiments_cpu", {"jobs": jobs, "rows": rows})


if __name__ == "__main__":
    main()
