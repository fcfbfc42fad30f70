"""Simulates random mixes of measured trainings on one GPU: the default policy against others, with the live estimator.

Usage: PYTHONPATH=src python benchmarks/sharing_mixes.py [--mixes N] [--oracle]

Each mix has three to eight trainings of the co-location table (`gpu_colocation.py`), 30 to 300 s long alone; in every
other mix they arrive over a minute, else together. Rates alone and in groups are as measured on the H200, or predicted
where a group was not measured. Policies see what a live run reports: steps per second five times a second, and memory.
A start takes 1.7 s and a change of a lane 1.5 s, as on the H200. `--oracle`: policies see the table's own interference
model instead. `--seconds` tries other lengths, without saving.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
from measured import ROOT, save

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimator
from carpool.core.messages import AssignApplied, JobFinished, Record
from carpool.core.model import Allocation, Job, JobId, JobSpec
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Pace
from carpool.sim.worlds.colocation import ColocationWorld

POLICIES = ("carpool", "competitive:most=8", "mps-equal:slots=4", "mps-equal:slots=8", "srtf", "fifo")
KIND = "H200"
START_S, CHANGE_S = 1.7, 1.5  # measured with `newcomer.py --gpu`


@dataclass(slots=True)
class StepWorld(ColocationWorld):
    """The co-location world counted in steps, as live jobs are."""

    start_s: float = START_S
    resize_s: float = CHANGE_S

    def pace(self, spec: JobSpec, done: float, placement: Placement) -> Pace:
        rate, until = ColocationWorld.pace(self, spec, done, placement)
        return Pace(rate / self._profile(spec).step_s, until)


class FollowingEstimator(OnlineEstimator):
    """The live estimator, with neighbours from the records of the simulation."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, {KIND: 1.0})
        self._held: dict[JobId, Allocation] = {}
        self._specs: dict[JobId, JobSpec] = {}
        self._moving: set[JobId] = set()
        self.neighbours_of = self._beside

    def record(self, record: Record) -> None:
        super().record(record)
        for fact in record.facts:
            if isinstance(fact, AssignApplied):
                self._moving.discard(fact.job)
            elif isinstance(fact, JobFinished):
                self._held.pop(fact.job, None)
            elif hasattr(fact, "spec"):
                self._specs[fact.spec.id] = fact.spec
        for job, allocation, _ in record.planned.changes if record.planned else ():
            self._held.pop(job, None)
            if allocation is not None:
                self._held[job] = allocation
                self._moving.add(job)

    def _beside(self, job: Job) -> Sequence[Neighbour] | None:
        own = set(job.observed.devices()) if job.observed is not None else set()
        others = {j: held for j, held in self._held.items() if j != job.id and own & set(held.devices())}
        if self._moving & {*others, job.id}:
            return None
        return [Neighbour(self._specs[j], held.shares[0].fraction, held.batch_size) for j, held in others.items()]


class Changes:
    """Counts changes of share of each job: all, and those while it runs (others come with a start)."""

    def __init__(self) -> None:
        self.count: dict[JobId, int] = {}
        self.running: dict[JobId, int] = {}
        self._last: dict[JobId, tuple[float, ...]] = {}
        self._waiting: set[JobId] = set()

    def record(self, record: Record) -> None:
        for job, allocation, purpose in record.planned.changes if record.planned else ():
            self.count.setdefault(job, 0)
            self.running.setdefault(job, 0)
            if allocation is None:
                self._waiting.add(job)
            elif not hasattr(purpose, "steps"):
                is_other = self._last.get(job, allocation.fractions) != allocation.fractions
                self.count[job] += is_other
                self.running[job] += is_other and job not in self._waiting
                self._last[job] = allocation.fractions
                self._waiting.discard(job)


def drawn(world: ColocationWorld, seed: int, lengths_s: tuple[float, float]) -> list[Arrival]:
    """A mix of trainings by seed, each so long alone."""
    random = Random(seed)
    table = world.table
    tasks = [(model, solo) for model, solos in table.profiles.items() for solo in solos]
    arrivals = []
    for place in range(random.randint(3, 8)):
        model, solo = random.choice(tasks)
        seconds = exp(random.uniform(log(lengths_s[0]), log(lengths_s[1])))
        at = 0.0 if seed % 2 == 0 else random.uniform(0.0, lengths_s[1] / 5.0)
        spec = JobSpec(JobId(f"j{place}-{model}"), 1, seconds / solo.step_s, model, solo.batch_size)
        arrivals.append(Arrival(at, spec))
    return sorted(arrivals, key=lambda arrival: arrival.submit_s)


def run(world: StepWorld, arrivals: list[Arrival], policy: str, *, oracle: bool) -> dict[str, Any]:
    """Mean completion time and lane changes of one policy on one mix."""
    cluster = Cluster.build([(1, 1, KIND)])
    filled, cluster = world.prepare(arrivals, cluster)
    changes = Changes()
    estimator: Estimator = world.estimator() if oracle else FollowingEstimator(cluster)
    if oracle:
        world = ColocationWorld(world.table, seed=world.seed, start_s=START_S, resize_s=CHANGE_S)  # type: ignore[assignment]
        filled = [Arrival(at, replace(s, work=(s.work or 0.0) * world._profile(s).step_s)) for at, s in filled]
    metrics = simulate(
        filled, cluster, parse_policy(policy), world, estimator=estimator, report_every_s=0.2, observers=[changes]
    )
    summary = metrics.summary()
    return {
        "policy": policy,
        "avg_jct_s": round(summary.avg_jct_s, 2),
        "makespan_s": round(summary.makespan_s, 2),
        "lane_changes": median(changes.count.values()),
        "lane_changes_running": median(changes.running.values()),
    }


def main() -> None:
    """Simulate all mixes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_colocation.json")
    parser.add_argument("--mixes", type=int, default=10)
    parser.add_argument("--seconds", default="30,300", help="least and most length of a training alone")
    parser.add_argument("--first", type=int, default=0, help="seed of the first mix")
    parser.add_argument("--oracle", action="store_true", help="policies see the table's interference model")
    options = parser.parse_args()
    world = StepWorld.load(options.table)
    shortest, longest = map(float, options.seconds.split(","))
    rows = []
    for seed in range(options.first, options.first + options.mixes):
        arrivals = drawn(world, seed, (shortest, longest))
        found = [run(world, arrivals, policy, oracle=options.oracle) for policy in POLICIES]
        best = min(row["avg_jct_s"] for row in found)
        rows.append({"seed": seed, "jobs": [spec.id for _, spec in arrivals], "policies": found})
        told = ", ".join(f"{row['policy']} {row['avg_jct_s']:.0f}/{row['makespan_s']:.0f}" for row in found)
        print(
            f"mix {seed} ({len(arrivals)} jobs): {told}; default {found[0]['avg_jct_s'] / best:.3f} of best", flush=True
        )
    means = {}
    for place, policy in enumerate(POLICIES):
        logs = [log(row["policies"][place]["avg_jct_s"]) for row in rows]
        means[policy] = round(float(np.exp(np.mean(logs))), 2)
    print("geometric means", means)
    for key in ("lane_changes", "lane_changes_running"):
        print("median", key, median(row["policies"][0][key] for row in rows))
    makespans = [[row["policies"][place]["makespan_s"] for row in rows] for place in range(len(POLICIES))]
    print(
        "makespans", {p: round(float(np.exp(np.mean(np.log(m)))), 2) for p, m in zip(POLICIES, makespans, strict=True)}
    )
    if options.seconds != "30,300":
        return
    name = "sharing_mixes" + ("_oracle" if options.oracle else "") + (f"_{options.first}" if options.first else "")
    save(name, {"geometric_mean_jct_s": means, "mixes": rows})


if __name__ == "__main__":
    main()
