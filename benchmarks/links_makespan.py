"""Simulates mixes of elastic jobs on machines with links of different speeds: links known against links ignored.

    python benchmarks/links_makespan.py [--mixes 10] [--policy carpool]

Eight machines of two devices; half of them have a network card of 100 Gbit/s, the others one of 1 to 10 Gbit/s. The
simulator stands for the machines: a step takes C = a + b·m/n on n devices, and a ring all-reduce over the slowest link
between them; links are not shared. The policy sees what a live fleet reports: links as measured, with an error of up to
5 %, gradient bytes once a job is loaded, rates and synchronisation every 5 s (`OnlineEstimator`). Without links it sees
all but links. Jobs need at least one, two or four devices, may use eight on up to four machines, and arrive together.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import exp, log
from random import Random
from statistics import geometric_mean
from typing import Any

from measured import save

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import AssignApplied, Record
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Link, Placement
from carpool.policies.registry import parse_policy
from carpool.runtime.executor.reports import Sized
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import SteadyWorld, TrainingSignals

NODES, SIZE = 8, 2
KIND = Kind("H200")
FAST, SLOW = 12.5e9, (1.2e8, 1.2e9)  # bytes per second of a machine's network
LATENCY_S = 5e-5
SHARED_MEMORY = 2e10  # bytes per second between devices of one machine
REPORT_S = 5.0
BATCH = 256


@dataclass(frozen=True, slots=True)
class Training:
    """How a job computes."""

    fixed_s: float
    per_sample_s: float
    gradient_bytes: float


@dataclass(slots=True)
class LinkedWorld(SteadyWorld):
    """Steps of computing and a ring all-reduce over the slowest link."""

    trainings: dict[JobId, Training]
    truth: Cluster  # with its links
    start_s: float = 2.0
    resize_s: float = 3.0
    report_every_s: float = REPORT_S

    def step_s(self, spec: JobSpec, placement: Placement) -> tuple[float, float]:
        """Seconds of a step and of its synchronisation."""
        training, count = self.trainings[spec.id], placement.num_devices
        speed, latency_s = SHARED_MEMORY, 0.0
        if placement.path is not None:
            speed, latency_s = placement.path
        sync_s = 2.0 * (count - 1) * (training.gradient_bytes / count / speed + latency_s)
        return training.fixed_s + training.per_sample_s * BATCH / count + sync_s, sync_s

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Steps per second."""
        return placement.fraction / max(1.0, placement.load) / self.step_s(spec, placement)[0]

    def signals(self, spec: JobSpec, done: float, placement: Placement) -> TrainingSignals:
        """Step time and synchronisation."""
        step_s, sync_s = self.step_s(spec, placement)
        return TrainingSignals(step_s=step_s, sync_s=sync_s or None)

    def estimator(self) -> Estimator:
        """None of its own."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TrueCluster(Cluster):
    """A cluster that policies see with measured links or without, and in which jobs run over the true ones."""

    truth: Cluster = field(default_factory=lambda: Cluster(()), compare=False)

    def placement(self, allocation: Allocation) -> Placement:
        """As it really is."""
        return self.truth.placement(allocation)


class LiveEstimator(OnlineEstimator):
    """The live estimator, told of gradient bytes when jobs are loaded; with links hidden if there are none."""

    def __init__(self, cluster: Cluster, trainings: dict[JobId, Training]) -> None:
        super().__init__(cluster, {KIND: 1.0})
        self._trainings = trainings

    def record(self, record: Record) -> None:
        """Take in a record; a job that runs for the first time reports its size."""
        super().record(record)
        for fact in record.facts:
            if isinstance(fact, AssignApplied) and fact.done == 0.0:
                size = int(self._trainings[fact.job].gradient_bytes)
                self.take(Sized(fact.job, None, BATCH, gradient_bytes=size))

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        """A rate, over measured links or without."""
        return super().rate(spec, placement if self.cluster.links else replace(placement, path=None))


def drawn(seed: int) -> tuple[list[Arrival], dict[JobId, Training], list[Link]]:
    """Jobs and links by seed."""
    random = Random(seed)
    fast = set(random.sample(range(NODES), NODES // 2))
    cards = [FAST if node in fast else between(random, *SLOW) for node in range(NODES)]
    links = [Link((f"n{a}", f"n{b}"), min(cards[a], cards[b]), LATENCY_S) for a, b in combinations(range(NODES), 2)]
    arrivals, trainings = [], {}
    for place in range(random.randint(4, 10)):
        name = JobId(f"j{place}")
        trainings[name] = Training(between(random, 0.005, 0.03), between(random, 1e-3, 6e-3), between(random, 5e7, 8e8))
        seconds = between(random, 1000.0, 8000.0)  # alone on one device
        steps = seconds / (trainings[name].fixed_s + trainings[name].per_sample_s * BATCH)
        least = random.choice((1, 1, 2, 4))
        spec = JobSpec(name, least, steps, str(name), BATCH, min_devices=least, max_devices=8, max_nodes=4)
        arrivals.append(Arrival(0.0, spec))
    return arrivals, trainings, links


def between(random: Random, low: float, high: float) -> float:
    """Log-uniform."""
    return exp(random.uniform(log(low), log(high)))


def run(seed: int, policy: str, *, with_links: bool) -> dict[str, float]:
    """One mix."""
    arrivals, trainings, links = drawn(seed)
    bare = replace(Cluster.build([(NODES, SIZE, KIND)]), max_nodes=1)
    truth = replace(bare, links=tuple(links))
    random = Random(seed + 1)
    measured = [replace(link, bytes_per_s=link.bytes_per_s * random.uniform(0.95, 1.05)) for link in links]
    seen = replace(bare, links=tuple(measured) if with_links else ())
    cluster = TrueCluster(seen.nodes, seen.links, seen.max_nodes, truth=truth)
    world = LinkedWorld(trainings, truth)
    metrics = simulate(arrivals, cluster, parse_policy(policy), world, estimator=LiveEstimator(seen, trainings))
    summary = metrics.summary()
    return {"makespan_s": round(summary.makespan_s, 1), "avg_jct_s": round(summary.avg_jct_s, 1)}


def main() -> None:
    """Simulate all mixes with and without links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=10)
    parser.add_argument("--policies", default="carpool,elastic")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for policy in options.policies.split(","):
        rows = []
        for seed in range(options.mixes):
            known, ignored = (run(seed, policy, with_links=links) for links in (True, False))
            gains = {key: round(ignored[key] / known[key], 3) for key in known}
            rows.append({"seed": seed, "links": known, "no_links": ignored, "gain": gains})
            print(f"{policy} mix {seed}: {known} with links, {ignored} without, gain {gains}", flush=True)
        mean = {
            key: round(geometric_mean([row["gain"][key] for row in rows]), 3) for key in ("makespan_s", "avg_jct_s")
        }
        print(f"{policy}: gain in makespan {mean['makespan_s']}, in mean completion time {mean['avg_jct_s']}")
        results[policy] = {"gain": mean, "mixes": rows}
        save("links_makespan", results)


if __name__ == "__main__":
    main()
