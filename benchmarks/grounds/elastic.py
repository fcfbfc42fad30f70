"""Elastic jobs with rates k^p: batches against heSRPT, the optimum, and Poisson arrivals at several loads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from oracles import hesrpt

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from grounds.ground import Ground, Limit, Row
from tests.support.scaling_world import ScalingWorld

DEVICES, BATCH = 64, 16
POLICIES = ("carpool", "elastic", "afs", "themis", "srtf", "las")
LOADS = (0.3, 0.6, 0.9)


def run(data: Path, quick: bool) -> Iterator[Row]:
    """Batches for every exponent, then Poisson loads."""
    seeds = range(1 if quick else 3)
    for exponent in (0.3, 0.5, 0.7, 0.9):
        batches = [np.random.default_rng(seed).lognormal(6.0, 1.0, BATCH).tolist() for seed in seeds]
        best = float(np.mean([hesrpt(sizes, exponent, DEVICES) for sizes in batches]))
        setting = f"batch k^{exponent}"
        yield Row(setting, "heSRPT", best, 0.0)
        for policy in ("carpool", "elastic", "afs"):
            yield _mean(
                setting,
                policy,
                [[Arrival(0.0, _job(i, size, 1)) for i, size in enumerate(b)] for b in batches],
                exponent,
            )
    for load in LOADS:
        runs = [_poisson(load, seed, 60 if quick else 200) for seed in seeds]
        for policy in POLICIES:
            yield _mean(f"load {load}", policy, runs, 0.7)


def _job(number: int, size: float, asked: int) -> JobSpec:
    return JobSpec(JobId(f"j{number}"), asked, size, min_devices=1, max_devices=DEVICES)


def _poisson(load: float, seed: int, num_jobs: int) -> list[Arrival]:
    """Jobs that ask for 8 devices and are `work` seconds long on them; load counts those devices."""
    random, at, found = Random(seed), 0.0, []
    mean_s = 600.0
    for number in range(num_jobs):
        at += random.expovariate(load * DEVICES / (8 * mean_s))
        found.append(Arrival(at, _job(number, random.lognormvariate(np.log(mean_s) - 0.5, 1.0), 8)))
    return found


def _mean(setting: str, policy: str, runs: list[list[Arrival]], exponent: float) -> Row:
    began = time.process_time()
    cluster = Cluster.build([(1, DEVICES, "V100")])
    world = ScalingWorld(exponent=exponent)
    jcts = [simulate(arrivals, cluster, parse_policy(policy), world).summary().avg_jct_s for arrivals in runs]
    return Row(setting, policy, float(np.mean(jcts)), time.process_time() - began)


GROUND = Ground(
    "elastic",
    "average JCT in s",
    run,
    limits=[
        *[
            Limit(f"batch k^{p}", policy, 1.03, "heSRPT")
            for p in (0.3, 0.5, 0.7, 0.9)
            for policy in ("carpool", "elastic")
        ],
        *[Limit(f"load {load}", "carpool", 1.0, other) for load in LOADS for other in ("themis", "srtf", "las")],
    ],
)
