"""Measures how long the default policy takes to decide, by number of jobs and devices.

    python benchmarks/decision_time.py [--policy carpool] [--decisions 12]

Three device types; a third of the jobs are gangs of 1 to 8, the others elastic from 1 to 32 devices, with weights. All
are submitted at once; then, decision after decision, one job ends and another arrives. Then the same with live
estimates: unknown jobs for one of 64 devices that report before every decision; and jobs for one to eight devices,
four devices per job, so that placements are compared over the links. Seconds are CPU time of the decision alone, with
the daemon's garbage collector settings. Exits with 1 when the first or the worst decision exceeds its limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from measured import save

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimator
from carpool.core.messages import AssignApplied, Fact, JobFinished, JobSubmitted, ProgressReported
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.service.daemon.gc_tuning import GcFreezer
from tests.support.scaling_world import ScalingWorld

SIZES = [(100, 1_000), (1_000, 1_000), (2_000, 1_000), (100, 10_000), (1_000, 10_000), (2_000, 10_000)]
LIVE = [1_000, 4_000, 10_000]  # jobs on 64 devices
ELASTIC = [100, 1_000, 2_000, 4_000]  # jobs, with four devices for each
SPEEDS = {"V100": 1.0, "P100": 0.55, "K80": 0.2}
LIMIT_S = 0.1


class Timed(Policy):
    """Stands in for a policy and takes the CPU time of its plans, also of those refused for a node's limits."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.seconds: list[float] = []
        self.shares_devices = policy.shares_devices  # type: ignore[misc]  # of this one, not of the class
        self.max_virtual = policy.max_virtual  # type: ignore[misc]

    def plan(self, view: Snapshot) -> Plan:
        """The plan of the other one."""
        began = time.thread_time()
        try:
            return self.inner.plan(view)
        finally:
            self.seconds.append(time.thread_time() - began)


def job(number: int, random: Random) -> JobSpec:
    """A gang, or an elastic job."""
    name, work, weight = JobId(f"j{number}"), random.lognormvariate(8.0, 1.5), float(random.randint(1, 5))
    if random.random() < 1 / 3:
        return JobSpec(name, random.choice((1, 2, 4, 8)), work, weight=weight)
    return JobSpec(name, 1, work, weight=weight, min_devices=1, max_devices=random.choice((4, 8, 16, 32)))


def single(number: int, random: Random) -> JobSpec:
    """A job of which nobody knows anything."""
    return JobSpec(JobId(f"j{number}"))


def unknown_width(number: int, random: Random) -> JobSpec:
    """The same for one to eight devices."""
    return JobSpec(JobId(f"j{number}"), min_devices=1, max_devices=8)


def measure(policy: str, num_jobs: int, num_devices: int, decisions: int) -> dict[str, Any]:
    """One row of jobs whose rates are known."""
    nodes = num_devices // 8
    cluster = Cluster.build([(nodes - 2 * (nodes // 3), 8, "V100"), (nodes // 3, 8, "P100"), (nodes // 3, 8, "K80")])
    oracle = ScalingWorld(exponent=0.8, speeds=SPEEDS).estimator()
    return follow(policy, cluster, oracle, job, num_jobs, decisions)


def measure_live(policy: str, num_jobs: int, decisions: int) -> dict[str, Any]:
    """One row of jobs whose rates are believed."""
    cluster = Cluster.build([(8, 8, "V100")])
    return follow(policy, cluster, OnlineEstimator(cluster), single, num_jobs, decisions)


def measure_elastic(policy: str, num_jobs: int, decisions: int) -> dict[str, Any]:
    """One row of elastic jobs whose rates are believed."""
    cluster = Cluster.build([(num_jobs // 2, 8, "V100")])
    return follow(policy, cluster, OnlineEstimator(cluster), unknown_width, num_jobs, decisions)


def follow(
    policy: str,
    cluster: Cluster,
    estimator: Estimator,
    make: Callable[[int, Random], JobSpec],
    num_jobs: int,
    decisions: int,
) -> dict[str, Any]:
    """Decide about all jobs at once, then about one that ends and one that comes, again and again."""
    random, timed = Random(0), Timed(parse_policy(policy))
    scheduler = Scheduler(cluster, timed, estimator=estimator)
    facts: list[Fact] = [JobSubmitted(make(number, random)) for number in range(num_jobs)]
    at = 0.0
    with GcFreezer():
        for step in range(decisions + 1):
            orders = scheduler.handle(at, facts)
            scheduler.handle(at, [AssignApplied(o.job, o.generation, 0.0) for o in orders if hasattr(o, "allocation")])
            at += 10.0
            running = [job for job in scheduler.jobs.values() if job.desired is not None]
            if isinstance(estimator, OnlineEstimator):
                told = [ProgressReported(j.id, j.generation, at, random.uniform(1.0, 2.0)) for j in running]
                scheduler.handle(at, told)
            ends = scheduler.jobs[random.choice(sorted([job.id for job in running]))]
            facts = [JobFinished(ends.id, ends.generation), JobSubmitted(make(num_jobs + step, random))]
    first, *others = timed.seconds[: decisions + 1]
    return {
        "jobs": num_jobs,
        "devices": cluster.num_devices,
        "first_s": round(first, 4),
        "median_s": round(median(others), 4),
        "worst_s": round(max(others), 4),
        "running": scheduler.num_running,
    }


def main() -> int:
    """Print a row for each size; exit code 1 when one takes longer than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policy", default="carpool")
    parser.add_argument("--decisions", type=int, default=12)
    options = parser.parse_args()
    results: dict[str, Any] = {"policy": options.policy, "rows": [], "live": [], "elastic": []}
    for num_jobs, num_devices in SIZES:
        tell(results["rows"], measure(options.policy, num_jobs, num_devices, options.decisions))
    print("what is believed changes before every decision:")
    for num_jobs in LIVE:
        tell(results["live"], measure_live(options.policy, num_jobs, options.decisions))
    print("the same, and jobs change their widths:")
    for num_jobs in ELASTIC:
        tell(results["elastic"], measure_elastic(options.policy, num_jobs, options.decisions))
    print(f"wrote {save('decision_time', results)}")
    largest = results["rows"][-1]
    return 0 if max(largest["first_s"], largest["worst_s"]) <= LIMIT_S else 1


def tell(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row and print it."""
    rows.append(row)
    print(
        f"{row['jobs']:6} jobs {row['devices']:6} devices: first {row['first_s'] * 1e3:7.1f} ms, "
        f"median {row['median_s'] * 1e3:7.1f} ms, worst {row['worst_s'] * 1e3:7.1f} ms, {row['running']} run",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
