"""Small recordings that the tests of the report share."""

from __future__ import annotations

import math

from carpool.core.topology import Cluster
from carpool.sim.report.recording import Recording, ReportHead, RunRecord, node_spans


def head(nodes: int = 2, size: int = 4, trace: str = "sample.csv") -> ReportHead:
    """A cluster of like nodes and a trace that lost one row."""
    cluster = Cluster.build([(nodes, size, "V100")])
    return ReportHead(trace, f"{nodes}x{size}xV100", nodes * size, node_spans(cluster), 7, "0.1.0", {"no GPU": 1})


def recording(num_jobs: int, num_devices: int = 8, length_s: float = 90.0) -> Recording:
    """Jobs that arrive every 10 s, take turns on the devices and all finish."""
    made = Recording(num_devices)
    for place in range(num_jobs):
        at, width = 10.0 * place, 1 + place % 3
        job = made.submitted(f"job-{place}", at, width, 1.0 + place % 2)
        first = place % (num_devices - width + 1)
        start, took = at + place % 7, length_s + place % 11
        made.held(job, first, first + width, start, start + took)
        made.ended(job, start + took, took)
        made.sample(at, place % 5, min(num_devices, width * 2))
    return made


def summary(policy: str, **values: float) -> dict[str, float | int | str | None]:
    """Every key of ``simulate --json`` for one policy."""
    base: dict[str, float | int | str | None] = {
        "policy": policy, "jobs": 10, "finished": 10, "avg_jct_s": 100.0, "p50_jct_s": 90.0, "p99_jct_s": 300.0,
        "avg_wait_s": 10.0, "makespan_s": 1000.0, "weighted_jct_s": 110.0, "utilisation": 0.5, "preemptions": 0,
        "resizes": 0, "wall_s": 0.1, "cpu_s": 0.1, "jobs_per_cpu_s": 100.0,
    }  # fmt: skip
    return base | values


def run(policy: str = "fifo", num_jobs: int = 10, **values: float) -> RunRecord:
    """A run whose jobs all finished."""
    return RunRecord(policy, summary(policy, **values), recording(num_jobs))


def empty_run(policy: str = "fifo") -> RunRecord:
    """A run in which three jobs were submitted and none started."""
    made = Recording(8)
    for place in range(3):
        made.submitted(f"job-{place}", float(place), 1)
    nan = math.nan
    values = {"finished": 0, "jobs": 3, "avg_jct_s": nan, "p50_jct_s": nan, "p99_jct_s": nan, "avg_wait_s": nan}
    return RunRecord(policy, summary(policy, **values, weighted_jct_s=nan, makespan_s=nan, utilisation=nan), made)
