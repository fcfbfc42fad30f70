"""Gavel's workload: gangs on three device types with its measured rates and pairs, rounds of 360 s, no costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from carpool.policies.registry import parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.traces.reader import read_trace
from carpool.sim.worlds.gavel import GavelWorld
from grounds.ground import Ground, Limit, Row

ROUND_S = 360.0
FAIR, MANY = "max_min_fairness.trace", "gen1000_l360_m_s0.trace"
SETTINGS = [  # name, trace, cluster, policies, seconds of a round
    (
        "96 jobs",
        FAIR,
        "2x4xV100,4x4xP100,3x8xK80",
        ("carpool:together=1", "carpool", "gavel", "gavel:objective=ftf", "gavel-fifo", "wsrtf", "allox:gang=true"),
        ROUND_S,
    ),
    (
        "96 jobs, makespan",
        FAIR,
        "2x4xV100,4x4xP100,3x8xK80",
        ("carpool:objective=makespan", "gavel:objective=makespan"),
        ROUND_S,
    ),
    ("96 jobs, at events", FAIR, "2x4xV100,4x4xP100,3x8xK80", ("carpool:together=1", "carpool", "gavel", "wsrtf"), 0.0),
    ("1000 jobs on 16", MANY, "4x4xV100,4x4xP100,4x4xK80", ("carpool", "gavel", "wsrtf"), ROUND_S),
    ("1000 jobs on 12", MANY, "3x4xV100,3x4xP100,3x4xK80", ("carpool", "gavel", "wsrtf"), ROUND_S),
]


def run(data: Path, quick: bool) -> Iterator[Row]:
    """Every setting; the thousand jobs are left out when it has to be quick."""
    world = GavelWorld.load(data / "gavel" / "simulation_throughputs.json")
    for setting, trace, cluster, policies, round_s in SETTINGS:
        if quick and trace == MANY:
            continue
        arrivals = read_trace(data / "gavel" / trace).arrivals
        for policy in policies:
            began = time.process_time()
            made = parse_policy(policy)
            found = simulate(arrivals, parse_cluster(cluster), made, world, round_s=round_s).summary()
            assert found.finished == len(arrivals), f"{policy}: {found.finished} of {len(arrivals)} jobs finished"
            figure = found.makespan_s if "makespan" in setting else found.avg_jct_s
            yield Row(setting, policy, figure, time.process_time() - began, {"makespan_s": found.makespan_s})


GROUND = Ground(
    "gavel",
    "average JCT in s (makespan where it says so)",
    run,
    needs="gavel",
    limits=[
        Limit("96 jobs", "carpool:together=1", 12_500.0),
        Limit("96 jobs", "carpool", 12_000.0),
        Limit("96 jobs, makespan", "carpool:objective=makespan", 1.01, "gavel:objective=makespan"),
        Limit("1000 jobs on 16", "carpool", 0.93, "gavel"),
        Limit("1000 jobs on 12", "carpool", 0.70, "gavel"),
    ],
)
