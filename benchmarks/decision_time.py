"""How long the default policy takes to decide: by number of active jobs and of devices, in a steady stream of changes.

    python benchmarks/decision_time.py [--policy carpool] [--decisions 12]

Three kinds of devices; a third of the jobs are gangs of 1 to 8, the others elastic from 1 to 32 devices, with weights.
All are submitted at once (the first decision deals everything out); then, decision after decision, one of them ends and
another one comes. Seconds are CPU time of the decision alone.
"""

from __future__ import annotations

import argparse
import time
from random import Random
from statistics import median
from typing import Any

from measured import save

from carpool.core.messages import AssignApplied, Fact, JobFinished, JobSubmitted
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.sim.worlds.scaling import ScalingWorld

SIZES = [(100, 1_000), (1_000, 1_000), (2_000, 1_000), (100, 10_000), (1_000, 10_000), (2_000, 10_000)]
SPEEDS = {"V100": 1.0, "P100": 0.55, "K80": 0.2}
LIMIT_S = 0.1


class Timed(Policy):
    """Stands in for a policy and takes the time of its plans."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.seconds: list[float] = []
        self.shares_devices = policy.shares_devices  # type: ignore[misc]  # of this one, not of the class
        self.max_virtual = policy.max_virtual  # type: ignore[misc]

    def plan(self, view: Snapshot) -> Plan:
        """The plan of the other one."""
        began = time.process_time()
        plan = self.inner.plan(view)
        self.seconds.append(time.process_time() - began)
        return plan


def job(number: int, random: Random) -> JobSpec:
    """A gang, or an elastic job."""
    name, work, weight = JobId(f"j{number}"), random.lognormvariate(8.0, 1.5), float(random.randint(1, 5))
    if random.random() < 1 / 3:
        return JobSpec(name, random.choice((1, 2, 4, 8)), work, weight=weight)
    return JobSpec(name, 1, work, weight=weight, min_devices=1, max_devices=random.choice((4, 8, 16, 32)))


def measure(policy: str, num_jobs: int, num_devices: int, decisions: int) -> dict[str, Any]:
    """One row."""
    random = Random(0)
    nodes = num_devices // 8
    cluster = Cluster.build([(nodes - 2 * (nodes // 3), 8, "V100"), (nodes // 3, 8, "P100"), (nodes // 3, 8, "K80")])
    timed = Timed(parse_policy(policy))
    scheduler = Scheduler(cluster, timed, estimator=ScalingWorld(exponent=0.8, speeds=SPEEDS).estimator())
    facts: list[Fact] = [JobSubmitted(job(number, random)) for number in range(num_jobs)]
    at = 0.0
    for step in range(decisions + 1):
        orders = scheduler.handle(at, facts)
        scheduler.handle(at, [AssignApplied(o.job, o.generation, 0.0) for o in orders if hasattr(o, "allocation")])
        at += 10.0
        running = sorted([job.id for job in scheduler.jobs.values() if job.desired is not None])
        ends = scheduler.jobs[random.choice(running)]
        facts = [JobFinished(ends.id, ends.generation), JobSubmitted(job(num_jobs + step, random))]
    first, *others = timed.seconds[: decisions + 1]
    return {
        "jobs": num_jobs,
        "devices": num_devices,
        "first_s": round(first, 4),
        "median_s": round(median(others), 4),
        "worst_s": round(max(others), 4),
        "running": scheduler.num_running,
    }


def main() -> int:
    """Print a row for each size; exit code 1 when the largest takes longer than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policy", default="carpool")
    parser.add_argument("--decisions", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for num_jobs, num_devices in SIZES:
        row = measure(options.policy, num_jobs, num_devices, options.decisions)
        rows.append(row)
        print(
            f"{num_jobs:5} jobs {num_devices:6} devices: first {row['first_s'] * 1e3:7.1f} ms, "
            f"median {row['median_s'] * 1e3:7.1f} ms, worst {row['worst_s'] * 1e3:7.1f} ms, {row['running']} run",
            flush=True,
        )
    print(f"wrote {save('decision_time', {'policy': options.policy, 'rows': rows})}")
    return 0 if rows[-1]["median_s"] <= LIMIT_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
