"""Pollux's workload: elastic jobs with tuned batches, 60 s rounds, 30 s per move; published and generated.

Generated workloads have the published applications in their proportions, other arrivals over eight hours with another
peak, and new requests. Settings of the default policy were chosen on those, not on the published one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from carpool.core.model import JobId
from carpool.policies.registry import parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.pollux import PolluxWorld
from grounds.ground import Ground, Limit, Row

CLUSTER, ROUND_S, HOURS = "16x4xV100", 60.0, 8
MIX = {"bert": 0.10, "cifar10": 0.40, "deepspeech2": 0.10, "imagenet": 0.025, "ncf": 0.32, "yolov3": 0.055}
RESIZE_S = 0.1  # what a resize takes here: benchmarks/runtime_resize.py


def generated(listed: list[Arrival], seed: int) -> list[Arrival]:
    """A workload of the same kind."""
    random = Random(seed)
    like: dict[str, list[Arrival]] = {}
    for arrival in listed:
        like.setdefault(arrival.spec.model, []).append(arrival)
    models = random.choices(list(MIX), weights=list(MIX.values()), k=len(listed))
    peak = random.uniform(0.3, 0.7)
    hourly = [1.0 + 3.0 * max(0.0, 1.0 - abs((hour + 0.5) / HOURS - peak) / 0.2) for hour in range(HOURS)]
    times = sorted(int(3600 * (random.choices(range(HOURS), weights=hourly)[0] + random.random())) for _ in listed)
    found = []
    for number, (at, model) in enumerate(zip(times, models, strict=True)):
        spec = random.choice(like[model]).spec
        found.append(Arrival(float(at), replace(spec, id=JobId(f"{model}-{number}"))))
    return found


def run(data: Path, quick: bool) -> Iterator[Row]:
    """The published workload in rounds and at events, then generated ones."""
    listed = list(read_trace(data / "pollux" / "workloads" / "workload-6.csv").arrivals)
    policies = ("carpool", "carpool:lengths=unknown", "pollux")
    for policy in policies:
        yield _row(data, "workload-6", policy, listed, ROUND_S, None)
    yield _row(data, "workload-6", "las:thresholds=57600:promote=0:placement=emptiest", listed, ROUND_S, None)
    for policy in policies[:2]:
        yield _row(data, "workload-6, at events, 0.1 s a move", policy, listed, 0.0, RESIZE_S)
    for seed in range(1, 2 if quick else 4):
        for policy in policies:
            yield _row(data, f"generated {seed}", policy, generated(listed, seed), ROUND_S, None)


def _row(data: Path, setting: str, policy: str, arrivals: list[Arrival], round_s: float, move_s: float | None) -> Row:
    world = PolluxWorld.load(data / "pollux")
    world.standstill_s = world.standstill_s if move_s is None else move_s
    jobs, cluster = world.prepare(arrivals, parse_cluster(CLUSTER))
    began = time.process_time()
    found = simulate(jobs, cluster, parse_policy(policy), world, round_s=round_s).summary()
    assert found.finished == len(jobs), f"{policy}: {found.finished} of {len(jobs)} jobs finished"
    more = {"makespan_s": found.makespan_s, "moves": float(found.resizes)}
    return Row(setting, policy, found.avg_jct_s, time.process_time() - began, more)


GROUND = Ground(
    "pollux",
    "average JCT in s",
    run,
    needs="pollux",
    limits=[
        Limit("workload-6", "carpool", 2_100.0),
        Limit("workload-6", "carpool:lengths=unknown", 2_300.0),
        *[Limit(f"generated {seed}", "carpool", 1.0, "pollux") for seed in (1, 2, 3)],
    ],
)
