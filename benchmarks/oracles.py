"""Compares elastic sharing with the known optimum: forms of afs against heSRPT on batches with s(k) = k^p.

Usage: python benchmarks/oracles.py
"""

from __future__ import annotations

import numpy as np
from measured import save

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.baselines.afs import Afs
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from tests.support.scaling_world import ScalingWorld


def hesrpt(sizes: list[float], exponent: float, devices: int) -> float:
    """Mean completion time of heSRPT, optimal for a batch with s(k) = k^p (Berg, Vesilo, Harchol-Balter 2020)."""
    left, now, total = sorted(sizes, reverse=True), 0.0, 0.0
    while left:
        edges = (np.arange(len(left) + 1) / len(left)) ** (1.0 / (1.0 - exponent))
        rates = (np.diff(edges) * devices) ** exponent
        step = left[-1] / rates[-1]
        now += step
        total += now
        left = [size - rate * step for size, rate in zip(left[:-1], rates[:-1], strict=True)]
    return total / len(sizes)


def afs(sizes: list[float], exponent: float, devices: int, policy: Afs) -> float:
    """Mean completion time of a policy on the same batch."""
    arrivals = [
        Arrival(0.0, JobSpec(JobId(f"j{i}"), 1, size, min_devices=1, max_devices=devices))
        for i, size in enumerate(sizes)
    ]
    cluster = Cluster.build([(1, devices, "V100")])
    return simulate(arrivals, cluster, policy, ScalingWorld(exponent=exponent)).summary().avg_jct_s


def main() -> None:
    """Print the ratio to the optimum, mean and worst over seeds."""
    results = []
    forms = {"afs": Afs(), "afs:optimism=1": Afs(optimism=1.0), "afs:ahead=true": Afs(ahead=True)}
    for exponent in (0.3, 0.5, 0.7, 0.9):
        for jobs in (2, 8, 16):
            batches = [np.random.default_rng(seed).lognormal(6.0, 1.0, jobs).tolist() for seed in range(5)]
            for name, policy in forms.items():
                ratios = [afs(sizes, exponent, 128, policy) / hesrpt(sizes, exponent, 128) for sizes in batches]
                row = {
                    "p": exponent,
                    "jobs": jobs,
                    "policy": name,
                    "mean": float(np.mean(ratios)),
                    "worst": max(ratios),
                }
                results.append(row)
                print(
                    f"s(k)=k^{exponent}  {jobs:2} jobs  {name:16} mean {row['mean']:.4f}  worst {row['worst']:.4f}",
                    flush=True,
                )
    print(f"wrote {save('oracles', results)}")


if __name__ == "__main__":
    main()
