"""Measures the cost per simulated job up to a million jobs: generated traces, equal load, consolidated FIFO.

Usage: python benchmarks/scale.py [--largest 1000000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measured import carpool, save

# jobs, nodes of 8: the cluster grows with the jobs, and once stays large while the jobs are few
SIZES = [(10_000, 125), (100_000, 1_250), (1_000_000, 12_500), (10_000, 12_500)]
LOAD = "0.8"


def main() -> None:
    """Generate, replay, and print CPU seconds per job without start-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=1_000_000, help="leave out larger traces")
    largest = parser.parse_args().largest
    start_up = min(carpool("policies", "--json").cpu_s for _ in range(3))
    print(f"start-up {start_up:.2f} CPU s", flush=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for jobs, nodes in SIZES:
            if jobs <= largest:
                results.append(_run(Path(folder) / "trace.csv", jobs, nodes, start_up))
    base = results[0]["us_per_job"]
    for row in results:
        row["times_first"] = round(row["us_per_job"] / base, 2)
        print(f"{row['jobs']:>9} jobs on {row['nodes']:>6} nodes: {row['times_first']} x the first")
    print(f"wrote {save('scale', results)}")


def _run(path: Path, jobs: int, nodes: int, start_up_s: float) -> dict[str, Any]:
    shape = ["--sizes", "1:0.7,2:0.1,4:0.1,8:0.1", "--lengths", "lognormal:median_s=1800:sigma=1.5"]
    carpool("trace", "generate", str(path), "--jobs", str(jobs), "--devices", str(nodes * 8), "--load", LOAD, *shape)
    usage = carpool("simulate", "--trace", str(path), "--cluster", f"{nodes}x8xV100", "--policy", "fifo", "--json")
    found = json.loads(usage.stdout)["results"][0]
    us_per_job = (usage.cpu_s - start_up_s) / jobs * 1e6
    print(
        f"{jobs:>9} jobs on {nodes:>6} nodes of 8: {usage.cpu_s:6.1f} CPU s, {us_per_job:5.1f} us a job, "
        f"{usage.peak_bytes / 2**20:5.0f} MB, finished {found['finished']}, utilisation {found['utilisation']:.2f}",
        flush=True,
    )
    return {
        "jobs": jobs,
        "nodes": nodes,
        "load": float(LOAD),
        "cpu_s": round(usage.cpu_s, 2),
        "us_per_job": round(us_per_job, 2),
        "peak_mb": round(usage.peak_bytes / 2**20),
        "utilisation": found["utilisation"],
    }


if __name__ == "__main__":
    main()
