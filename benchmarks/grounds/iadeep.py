"""IADeep's workload: 20 devices, 300 jobs of nine trainings, Philly arrivals.

The truth is the co-location table of one H200 (`--world colocation:FILE`); devices have 24 GiB as in the text.
Trainings missing in the table are replaced by the nearest: ResNet50 at 256 for 1024, a GCN for AD-GCL. Lengths are
drawn by the text's size classes. Every policy starts each job from its own batch; tuning policies may use a quarter to
sixteen times of it, within what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.distributions import Bursty
from carpool.sim.traces.reader import read_trace
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.colocation import ColocationWorld
from grounds.ground import Ground, Row

KIND, DEVICES, MEMORY_BYTES, JOBS = Kind("H200"), 20, 24 << 30, 300
SIZES = {"S": 300.0, "M": 900.0, "L": 2400.0, "XL": 7200.0}  # median seconds alone
SIGMA = 0.5
POLICIES = ("carpool", "iadeep", "fifo", "mps-equal", "antman", "kernel-est")
TABLE = Path(__file__).parent.parent / "results" / "gpu_colocation.json"


class Sort(NamedTuple):
    """One of the nine trainings."""

    model: str
    batch_size: int
    size: str
    percent: float


SORTS = (
    Sort("vgg16", 512, "S", 14),
    Sort("squeezenet", 512, "S", 14),
    Sort("resnet50", 256, "S", 14),
    Sort("ncf", 1024, "M", 12),
    Sort("gcn", 140, "M", 12),
    Sort("lstm", 256, "M", 12),
    Sort("bert_base", 8, "L", 10),
    Sort("yolo", 32, "L", 10),
    Sort("resnet18-imagenet", 128, "XL", 2),
)


def jobs(world: ColocationWorld, seed: int, load: float, data: Path | None = None, count: int = JOBS) -> list[Arrival]:
    """The stream at an offered load: work over what the devices could do one job at a time, until the last arrival."""
    random = Random(seed)
    sorts = random.choices(SORTS, [sort.percent for sort in SORTS], k=count)
    works = [SIZES[sort.size] * random.lognormvariate(0.0, SIGMA) for sort in sorts]
    times = _instants(random, count, data)
    stretch = sum(works) / (load * DEVICES) / times[-1]
    found = []
    for number, (at, sort, work) in enumerate(zip(times, sorts, works, strict=True)):
        known = [profile.batch_size for profile in world.table.profiles[sort.model]]
        low, high = max(min(known), sort.batch_size // 4), min(max(known), sort.batch_size * 16)
        tunes = (low, high) if low < high else None
        spec = JobSpec(JobId(f"j{number:03}"), 1, work, sort.model, sort.batch_size, batch_range=tunes)
        found.append(Arrival(at * stretch, spec))
    return found


def _instants(random: Random, count: int, data: Path | None) -> list[float]:
    """Submissions of a stretch of the trace, from 0; bursts of our own where the trace is absent."""
    path = data / "traces" / "philly_dense20k.csv" if data is not None else None
    if path is None or not path.is_file():
        return Bursty(burst=6.0, width_s=120.0).draw(count, 0.02, random)
    listed = [arrival.submit_s for arrival in read_trace(path).arrivals]
    start = random.randrange(len(listed) - count)
    chosen = listed[start : start + count]
    return [at - chosen[0] for at in chosen]


def cluster() -> Cluster:
    """Five machines of four devices."""
    built = Cluster.build([(5, 4, KIND)])
    banks = [tuple(replace(bank, memory_bytes=MEMORY_BYTES) for bank in node.banks) for node in built.nodes]
    nodes = tuple(replace(node, banks=found) for node, found in zip(built.nodes, banks, strict=True))
    return Cluster(nodes, built.links)


def run(data: Path, quick: bool) -> Iterator[Row]:
    """One stream at the middle load; several streams and loads are in ``benchmarks/iadeep.py``."""
    world = ColocationWorld.load(TABLE)
    world.report_every_s = 30.0
    arrivals, there = world.prepare(jobs(world, 0, 1.2, data, 100 if quick else JOBS), cluster())
    for policy in POLICIES:
        began = time.process_time()
        found = simulate(arrivals, there, parse_policy(policy), world).summary()
        assert found.finished == len(arrivals), f"{policy}: {found.finished} of {len(arrivals)} jobs finished"
        yield Row(
            "load 1.2, one stream",
            policy,
            found.avg_jct_s,
            time.process_time() - began,
            {"makespan_s": found.makespan_s},
        )


GROUND = Ground("iadeep", "average JCT in s", run)
