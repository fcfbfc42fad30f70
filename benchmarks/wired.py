"""Compares policies in the world of links when link speeds are learned, known, or replaced by linear scaling.

Usage: PYTHONPATH=src python benchmarks/wired.py [--seeds N]

Average JCT in the world `wired`: 40 jobs of five models, one every minute, on 4 nodes of 4 devices of each of two
types; speeds of devices, buses and network, sizes of models and costs of moves are drawn by seed. Intervals are 95 %
(Student's t) over seeds, of the ratio to the same policy with perfect knowledge. About three minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import sqrt
from random import Random
from typing import Any

import numpy as np
from measured import save
from scipy.stats import t as student

from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.predictors.links.estimator import LinkEstimator
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.wired import WiredWorld

CLUSTER = Cluster.build([(4, 4, "A"), (4, 4, "B")])
POLICIES = {1.0: ("elastic", "carpool", "afs", "srtf"), 30.0: ("elastic", "carpool")}  # by seconds of a move
BELIEFS = ("told everything", "learns links and moves", "learns links only", "believes in proportion")
JOBS, EVERY_S = 40, 60.0


def trace(seed: int) -> list[Arrival]:
    """Poisson arrivals of log-normal lengths."""
    random, at, found = Random(seed), 0.0, []
    for number in range(JOBS):
        at += random.expovariate(1.0 / EVERY_S)
        work, model = random.lognormvariate(6.0, 1.0), f"m{random.randrange(5)}"
        found.append(Arrival(at, JobSpec(JobId(f"j{number}"), random.choice((1, 2, 4)), work, model)))
    return found


class MovesUnknown(LinkEstimator):
    """Learns the links; moves are taken to cost what the policy takes them for."""

    def move_s(self, spec: JobSpec) -> None:
        """Nobody knows."""


def run(policy: str, belief: str, resize_s: float, seed: int) -> tuple[float, list[float]]:
    """Average JCT, and the relative errors of the prices of moves as they were learned."""
    world = WiredWorld(seed, resize_s=resize_s)
    arrivals, cluster = world.prepare(trace(seed), CLUSTER)
    estimators: dict[str, Estimator] = {
        "told everything": world.oracle(),
        "learns links and moves": world.estimator(),
        "learns links only": MovesUnknown(cluster),
        "believes in proportion": DeclaredEstimator(),
    }
    estimator = estimators[belief]
    summary = simulate(arrivals, cluster, parse_policy(policy), world, estimator=estimator).summary()
    errors = []
    if isinstance(estimator, LinkEstimator):
        for _, spec in arrivals:
            price = estimator.move_s(spec)
            truth = world.oracle().move_s(spec)
            errors += [] if price is None else [abs(price / truth - 1.0)]
    return summary.avg_jct_s, errors


def compared(policy: str, resize_s: float, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One policy under every belief."""
    told: list[float] = []
    for belief in BELIEFS:
        found = [run(policy, belief, resize_s, seed) for seed in seeds]
        times = [jct for jct, _ in found]
        told = told or times
        ratios = np.array(times) / np.array(told)
        within = float(student.ppf(0.975, len(ratios) - 1)) * float(np.std(ratios, ddof=1)) / sqrt(len(ratios))
        row = {
            "resize_s": resize_s,
            "policy": policy,
            "belief": belief,
            "avg_jct_s": round(float(np.mean(times)), 1),
            "to_told": round(float(ratios.mean()), 3),
            "within": round(within, 3),
        }
        prices = [error for _, errors in found for error in errors]
        yield {**row, "move_price_mape": round(float(np.mean(prices)), 3)} if prices else row


def main() -> None:
    """Every policy under every belief, with cheap and with dear moves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    seeds = range(parser.parse_args().seeds)
    rows: list[dict[str, Any]] = []
    for resize_s, policies in POLICIES.items():
        for policy in policies:
            for row in compared(policy, resize_s, seeds):
                rows.append(row)
                price = f"; price of a move within {row['move_price_mape']:.1%}" if "move_price_mape" in row else ""
                ratio = f"{row['to_told']:6.2f} +/- {row['within']:.2f}"
                place = f"moves of {resize_s:2g} s  {policy:10} {row['belief']:24}"
                print(f"{place} {row['avg_jct_s']:9.1f} s  {ratio}{price}", flush=True)
    print(save("wired", rows))


if __name__ == "__main__":
    main()
