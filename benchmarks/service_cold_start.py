"""Measures the CPU time of `carpool ps` from a cold start.

python benchmarks/service_cold_start.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import measured

from tests.support.http_rig import serve_http

RUNS = 15
JOBS = 50


def main() -> None:
    """Measure and print as it goes."""
    with tempfile.TemporaryDirectory() as folder, serve_http(Path(folder)) as served:
        body = served.rig.body(*(f"job{number}" for number in range(JOBS)))
        served.do(served.rig["root"].post("/v1/jobs", json=body))
        environment = {
            **os.environ,
            "CARPOOL_SERVER": f"unix:{served.socket}",
            "PYTHONPATH": str(measured.ROOT / "src"),
        }
        seconds = sorted(_cpu_s(environment) for _ in range(RUNS))
    row = {"runs": RUNS, "jobs": JOBS, "cpu_s": {"median": seconds[RUNS // 2], "worst": seconds[-1]}}
    print(f"carpool ps: {row['cpu_s']['median']:.3f} CPU s (median of {RUNS}), worst {row['cpu_s']['worst']:.3f}")
    print(measured.save("service_cold_start", row))


def _cpu_s(environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "carpool", "ps"], env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
