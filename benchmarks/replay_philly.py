"""Replays the densest 20,000 jobs of the Philly trace: exact figures, and CPU seconds of the whole process.

Usage: python benchmarks/replay_philly.py [--data DIR]
The exact figures and the CPU seconds of two other simulators on the same file are in that folder's README.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measured import carpool, save

DENSE, ALL = "traces/philly_dense20k.csv", "traces/philly.csv"
# trace, cluster, policy, (avg JCT, avg wait, makespan) where a correct simulator must print exactly that, CPU s allowed
ROWS: list[tuple[str, str, str, tuple[float, float, float] | None, float]] = [
    (DENSE, "1x512xV100", "fifo", (15887.39, 8184.30, 1218476), 1.5),
    (DENSE, "1x512xV100", "fifo:bypass=true", (14812.43, 7109.34, 1213042), 1.5),
    (DENSE, "64x8xV100", "fifo", (21395.34, 13692.25, 1228669), 1.5),
    (DENSE, "1x512xV100", "srtf", None, 10.0),
    (DENSE, "64x8xV100", "srtf", None, 10.0),
    (DENSE, "1x512xV100", "las", None, 10.0),
    (DENSE, "64x8xV100", "las", None, 10.0),
    (ALL, "1x512xV100", "fifo", None, 5.0),
    (DENSE, "64x8xV100", "carpool", None, 120.0),
]


def main() -> None:
    """Run every row and print reached against wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="folder that holds traces/")
    data = Path(parser.parse_args().data)
    results: list[dict[str, Any]] = []
    for trace, cluster, policy, exact, cpu_limit_s in ROWS:
        if not (data / trace).is_file():
            raise SystemExit(f"there is no {data / trace}; name the folder with --data")
        usage = carpool("simulate", "--trace", str(data / trace), "--cluster", cluster, "--policy", policy, "--json")
        found = json.loads(usage.stdout)["results"][0]
        reached = (round(found["avg_jct_s"], 2), round(found["avg_wait_s"], 2), round(found["makespan_s"]))
        verdict = "" if exact is None else ("exact" if reached == exact else f"WRONG, should be {exact}")
        print(
            f"{Path(trace).stem:16} {cluster:11} {policy:17} avg JCT {reached[0]:>10.2f}  wait {reached[1]:>9.2f}  "
            f"makespan {reached[2]:>8}  {usage.cpu_s:5.2f} CPU s (limit {cpu_limit_s:g})  "
            f"{usage.peak_bytes / 2**20:4.0f} MB  {verdict}",
            flush=True,
        )
        row = {"trace": Path(trace).name, "cluster": cluster, "policy": policy, "wanted": exact, "reached": reached}
        results.append({**row, "cpu_s": round(usage.cpu_s, 3), "peak_mb": round(usage.peak_bytes / 2**20)})
    print(f"wrote {save('replay_philly', results)}")


if __name__ == "__main__":
    main()
