"""Compares shares chosen by search and verification with equal shares, on mixes of the co-location table.

Usage: PYTHONPATH=src python benchmarks/competitive.py [--table FILE]

The truth is `--world colocation:FILE`: measured groups as measured, others from a model fitted to all groups. The
search knows 135 random groups and verifies up to three vectors. For each mix: Σ P / P(alone) and its geometric mean
for sequential runs, the best equal share of a grid, the chosen vector, and the optimum on a grid of levels. Then a
stream of jobs on one device under several policies. About one minute.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measured import RESULTS, save

from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.policies.sharing.share_search import Setting, ShareSearch, Tenant, Vector, fair
from carpool.policies.sharing.trial_log import Trial
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.colocation import ColocationWorld

KIND = Kind("H200")
LEVELS = (0.1, 0.15, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.8, 1.0)
EQUAL = (0.25, 0.33, 0.4, 0.5, 0.6, 1.0)
MIXES = {
    "VGG16 + ResNet18 + MobileNetV3": (("vgg16", 128), ("resnet18", 128), ("mobilenet_v3", 128)),
    "ResNet50 + ShuffleNetV2 + DenseNet121": (("resnet50", 128), ("shufflenet_v2", 128), ("densenet121", 128)),
    "VGG16 at 512, ResNet18 at 64, MobileNetV3 at 32": (("vgg16", 512), ("resnet18", 64), ("mobilenet_v3", 32)),
    "ResNet101 at 256, two small": (("resnet101", 256), ("mobilenet_v3", 32), ("shufflenet_v2", 32)),
    "BERT, NCF, GCN, LSTM": (("bert_base", 8), ("ncf", 1024), ("gcn", 140), ("lstm", 32)),
    "VGG16 at 512, three small": (("vgg16", 512), ("shufflenet_v2", 32), ("ncf", 1024), ("bert_small", 8)),
}
POLICIES = ("fifo", "mps-equal", "kernel-est", "antman", "competitive", "competitive:objective=raw")
TRIES, MIN_GAIN = 3, 0.02


class Truth:
    """What really happens to a mix."""

    def __init__(self, world: ColocationWorld, tenants: list[Tenant]) -> None:
        self.world, self.tenants = world, tenants

    def speeds(self, vector: Vector) -> list[float]:
        """True speeds relative to alone."""
        found = []
        for place, (tenant, setting) in enumerate(zip(self.tenants, vector, strict=True)):
            others = tuple(
                Neighbour(other.spec, s.fraction, s.batch_size)
                for i, (other, s) in enumerate(zip(self.tenants, vector, strict=True))
                if i != place
            )
            placement = Placement(((KIND, 1),), setting.fraction, setting.batch_size, others)
            found.append(self.world.pace(tenant.spec, 0.0, placement).rate)
        return found


def choose(truth: Truth, search: ShareSearch) -> tuple[Vector, int]:
    """What `competitive` does for one mix, with the truth as its measurements; the vector kept, and how many tried."""
    vector, _ = search.best()
    trial = Trial(tuple(tenant.spec.id for tenant in truth.tenants), vector, 0.0)
    while True:
        trial = trial.judged(search, truth.speeds(trial.now))
        if trial.is_last(TRIES):
            return trial.best, len(trial.tried)
        search.corrections = trial.corrections
        tried = [each.vector for each in trial.tried]
        vector, values = search.best(trial.best, tabu=tried)
        if vector in tried or search.value(values) <= trial.value * (1.0 + MIN_GAIN):
            return trial.best, len(trial.tried)
        trial = Trial(trial.mix, vector, 0.0, trial.tried, trial.corrections)
        search.corrections = {}


def mixes(world: ColocationWorld) -> list[dict[str, Any]]:
    """Every mix of the list."""
    rows = []
    for name, tasks in MIXES.items():
        specs = [JobSpec(JobId(f"{model}-{batch}"), 1, 1.0, model, batch) for model, batch in tasks]
        tenants = [Tenant(spec) for spec in specs]
        truth, estimates = Truth(world, tenants), world.estimator()
        search = ShareSearch(estimates, KIND, tenants, LEVELS)
        estimates.rate(specs[0], Placement(((KIND, 1),), 0.5, 0, (Neighbour(specs[1], 0.5),)))  # fits the model once
        started = time.process_time()
        vector, tried = choose(truth, search)
        search_s = time.process_time() - started
        ones = [1.0] * len(specs)
        equal = max((truth.speeds(search.equal(level)) for level in EQUAL), key=lambda values: fair(ones, values))
        chosen = truth.speeds(vector)
        grid = itertools.product(LEVELS[1::2], repeat=len(specs))
        best = max((truth.speeds(tuple(map(Setting, levels))) for levels in grid), key=lambda v: fair(ones, v))
        wide = [
            Tenant(replace(spec, batch_range=(max(1, spec.batch_size // 4), 4 * spec.batch_size))) for spec in specs
        ]
        joint_vector, _ = choose(Truth(world, wide), ShareSearch(world.estimator(), KIND, wide, LEVELS))
        joint = Truth(world, wide).speeds(joint_vector)
        turns = [1.0 / len(specs)] * len(specs)
        ways = {"one after another": turns, "best equal": equal, "chosen": chosen, "with batches": joint, "grid": best}
        error = np.mean([abs(b / r - 1.0) for b, r in zip(_believed(world, tenants, vector), chosen, strict=True)])
        row = {
            "mix": name,
            "chosen": [setting.fraction for setting in vector],
            "chosen_with_batches": [list(setting) for setting in joint_vector],
            "measured_vectors": tried,
            "sum": {name: round(sum(values), 3) for name, values in ways.items()},
            "fair": {name: round(fair(ones, values), 3) for name, values in ways.items()},
            "search_cpu_s": round(search_s, 3),
            "error_before_measuring": round(float(error), 4),
        }
        rows.append(row)
        print(
            f"{name:48} Σ {row['sum']['best equal']:.2f} equal, {row['sum']['chosen']:.2f} chosen "
            f"({'/'.join(f'{s.fraction:.0%}' for s in vector)}); fair {row['fair']['best equal']:.3f} equal, "
            f"{row['fair']['chosen']:.3f} chosen, {row['fair']['grid']:.3f} grid, "
            f"{row['fair']['with batches']:.3f} with batches; "
            f"{search_s:.2f} CPU s, {tried} measured",
            flush=True,
        )
    return rows


def _believed(world: ColocationWorld, tenants: list[Tenant], vector: Vector) -> list[float]:
    return ShareSearch(world.estimator(), KIND, tenants, LEVELS).believed([vector])[0]


def stream(world: ColocationWorld, seed: int) -> dict[str, Any]:
    """Forty jobs of the table's models on one device, one every two minutes on average."""
    rng = np.random.default_rng(seed)
    tasks = [(model, p.batch_size) for model, known in world.table.profiles.items() for p in known]
    at, arrivals = 0.0, []
    for number in range(40):
        model, batch = tasks[rng.integers(len(tasks))]
        arrivals.append(Arrival(at, JobSpec(JobId(f"j{number:02}"), 1, float(rng.lognormal(5.0, 0.8)), model, batch)))
        at += float(rng.exponential(120.0))
    prepared, cluster = world.prepare(arrivals, Cluster.build([(1, 1, KIND)]))
    found = {}
    for text in POLICIES:
        started = time.process_time()
        summary = simulate(prepared, cluster, parse_policy(text), world).summary()
        found[text] = {
            "avg_jct_s": round(summary.avg_jct_s, 1),
            "makespan_s": round(summary.makespan_s, 1),
            "cpu_s": round(time.process_time() - started, 2),
        }
        row = found[text]
        print(
            f"seed {seed}: {text:28} avg JCT {row['avg_jct_s']:8.1f} s, makespan {row['makespan_s']:8.1f} s", flush=True
        )
    return found


def main() -> None:
    """The mixes, then the stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RESULTS / "gpu_colocation.json")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    world = ColocationWorld.load(options.table)
    results = {"mixes": mixes(world), "stream": [stream(world, seed) for seed in range(options.seeds)]}
    print(save("competitive", results))


if __name__ == "__main__":
    main()
