"""Days of a lab's queue, one hundred users: waits and slowdowns by class of job under several policies.

    python benchmarks/lab_queue.py [--days 3] [--seeds 2]

Interactive jobs, sweeps, trainings of hours, of days, and jobs with deadlines come by day more than by night. The
slowdown is completion time over run time alone, at least one minute; the wait is completion time without time on
devices. Moves cost nothing here, which favours policies that preempt; lengths are known except where it says so.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from math import pi, sin
from typing import Any

import numpy as np
from measured import save

from carpool.core.messages import JobFinished, JobSubmitted, Record
from carpool.core.model import JobId, JobSpec
from carpool.policies.registry import parse_policy
from carpool.sim.cluster_spec import parse_cluster
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival

USERS, CLUSTER = 100, "8x4xA100"
POLICIES = ("carpool", "carpool:wait_s=0", "carpool:lengths=unknown", "fifo:bypass=true", "multifactor")
DAY_S = 86_400.0
# class: jobs a day, median and spread of seconds, devices, jobs submitted at once, deadline as a multiple of the length
CLASSES: dict[str, tuple[float, float, float, tuple[int, ...], int, float]] = {
    "interactive": (120.0, 600.0, 0.6, (1,), 1, 0.0),
    "sweep": (6.0, 1_800.0, 0.5, (1,), 12, 0.0),
    "hours": (30.0, 3 * 3_600.0, 0.7, (1, 1, 2, 4), 1, 0.0),
    "days": (3.0, 24 * 3_600.0, 0.4, (1, 2, 4, 8), 1, 0.0),
    "deadline": (10.0, 2 * 3_600.0, 0.5, (1, 2), 1, 4.0),
}


def arrivals(days: float, seed: int) -> list[Arrival]:
    """Jobs of all classes, more by day than by night."""
    random = np.random.default_rng(seed)
    found: list[Arrival] = []
    for name, (a_day, median_s, spread, widths, together, slack) in CLASSES.items():
        for number in range(int(random.poisson(a_day * days))):
            at = _moment(random, days)
            user = f"u{int(random.integers(USERS))}"
            for member in range(together):
                work = float(median_s * random.lognormal(0.0, spread))
                spec = JobSpec(
                    JobId(f"{name}-{number}-{member}"),
                    int(random.choice(widths)),
                    work,
                    model=name,
                    user=user,
                    deadline_s=slack * work,
                )
                found.append(Arrival(at, spec))
    return sorted(found, key=lambda arrival: (arrival[0], arrival.spec.id))


def _moment(random: np.random.Generator, days: float) -> float:
    """A time of submission; three times as likely in the afternoon as at night."""
    while True:
        at = float(random.uniform(0.0, days * DAY_S))
        if random.uniform(0.0, 1.5) < 1.0 + 0.5 * sin(2.0 * pi * (at / DAY_S - 0.375)):
            return at


@dataclass
class Waits:
    """An observer that keeps each job's completion time and its time on devices."""

    began: dict[JobId, JobSpec] = field(default_factory=dict)
    at: dict[JobId, float] = field(default_factory=dict)
    since: dict[JobId, float] = field(default_factory=dict)
    held_s: dict[JobId, float] = field(default_factory=dict)
    changes: dict[JobId, int] = field(default_factory=dict)
    done: list[tuple[JobSpec, float, float]] = field(default_factory=list)  # spec, completion time, wait

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, JobSubmitted):
                self.began[fact.spec.id], self.at[fact.spec.id] = fact.spec, record.at
            elif isinstance(fact, JobFinished):
                self._stop(fact.job, record.at)
                jct = record.at - self.at[fact.job]
                self.done.append((self.began[fact.job], jct, max(0.0, jct - self.held_s.get(fact.job, 0.0))))
        for change in record.planned.changes if record.planned is not None else ():
            if change.allocation is None:
                self._stop(change.job, record.at)
                self.changes[change.job] = self.changes.get(change.job, 0) + 1
            else:
                self.since.setdefault(change.job, record.at)

    def _stop(self, job: JobId, at: float) -> None:
        begun = self.since.pop(job, None)
        if begun is not None:
            self.held_s[job] = self.held_s.get(job, 0.0) + at - begun


def figures(done: list[tuple[JobSpec, float, float]], seen: Waits) -> dict[str, float]:
    """Waits, slowdowns, preemptions and missed deadlines of some jobs."""
    waits = np.array([wait for _, _, wait in done])
    slow = np.array([max(1.0, jct / max(60.0, spec.work or 0.0)) for spec, jct, _ in done])
    late = [jct > spec.deadline_s for spec, jct, _ in done if spec.deadline_s]
    return {
        "jobs": len(done),
        "mean_wait_s": round(float(waits.mean()), 1),
        "p95_wait_s": round(float(np.quantile(waits, 0.95)), 1),
        "longest_wait_s": round(float(waits.max()), 1),
        "mean_slowdown": round(float(slow.mean()), 3),
        "worst_slowdown": round(float(slow.max()), 2),
        "avg_jct_s": round(float(np.mean([jct for _, jct, _ in done])), 1),
        "most_preemptions": max(seen.changes.get(spec.id, 0) for spec, _, _ in done),
        "late": sum(late),
    }


def main() -> None:
    """Run every seed under every policy and print each class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        jobs, cluster = arrivals(options.days, seed), parse_cluster(CLUSTER)
        work = sum((a.spec.work or 0.0) * a.spec.devices for a in jobs)
        load = work / (cluster.num_devices * options.days * DAY_S)
        for policy in POLICIES:
            seen = Waits()
            simulate(jobs, cluster, parse_policy(policy), observers=[seen])
            assert len(seen.done) == len(jobs), f"{policy}: {len(seen.done)} of {len(jobs)} jobs finished"
            for name in (*CLASSES, "all"):
                row = figures([each for each in seen.done if name in ("all", each[0].model)], seen)
                rows.append({"seed": seed, "load": round(load, 3), "policy": policy, "class": name, **row})
                words = "  ".join(f"{key} {value:g}" for key, value in row.items())
                print(f"seed {seed} load {load:.2f} {policy:23} {name:12} {words}", flush=True)
    print(f"wrote {save('lab_queue', {'days': options.days, 'users': USERS, 'cluster': CLUSTER, 'rows': rows})}")


if __name__ == "__main__":
    main()
