"""Gangs on one device type with known lengths: part of the Philly trace, and a generated one with weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from carpool.policies.registry import parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival
from grounds.ground import Ground, Limit, Row

CLUSTER, JOBS = "1x256xV100", 2_500
POLICIES = ("carpool", "srtf", "wsrtf", "las", "fifo:bypass=true")


def run(data: Path, quick: bool) -> Iterator[Row]:
    """The trace as it is, then with weights from 1 to 5."""
    listed = list(read_trace(data / "traces" / "philly_dense20k.csv").arrivals)[: 500 if quick else JOBS]
    random = Random(0)
    weighted = [Arrival(at, replace(spec, weight=float(random.randint(1, 5)))) for at, spec in listed]
    for setting, arrivals in (("philly", listed), ("philly, weighted", weighted)):
        for policy in POLICIES:
            began = time.process_time()
            found = simulate(arrivals, parse_cluster(CLUSTER), parse_policy(policy)).summary()
            assert found.finished == len(arrivals), f"{policy}: {found.finished} of {len(arrivals)} jobs finished"
            figure = found.weighted_jct_s if "weighted" in setting else found.avg_jct_s
            yield Row(setting, policy, figure, time.process_time() - began, {"makespan_s": found.makespan_s})


GROUND = Ground(
    "rigid",
    "average (weighted) JCT in s",
    run,
    needs="traces",
    limits=[
        Limit("philly", "carpool", 1.01, "srtf"),
        Limit("philly, weighted", "carpool", 1.01, "wsrtf"),
    ],
)
