"""A simulated counterpart of a live table: measured speeds, no starts, no moves; and Hare's rule per task on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.core.estimates import Estimator
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import Oracle, SteadyWorld
from seeds.runs import Planned
from seeds.task_rule import TaskJob, ends, weighted_jct_s

PER_TASK = "hare-literal, per task"
_SWITCH_S = 0.0002  # between jobs on a device, as measured for time slices


@dataclass(frozen=True)
class LaneWorld(SteadyWorld):
    """Jobs of one device as fast as they were measured on each device type."""

    speeds: Mapping[str, Mapping[str, float]]  # steps per second by model and device type

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        """Steps per second, divided among the jobs of a device."""
        (kind, _), *_ = placement.groups
        return self.speeds[spec.model][kind] * placement.fraction / max(1.0, placement.load)

    def estimator(self) -> Estimator:
        """The truth."""
        return Oracle(self)


def simulated_s(
    jobs: Sequence[Planned], cluster: Cluster, speeds: Mapping[str, Mapping[str, float]], policies: Sequence[str]
) -> dict[str, float]:
    """Weighted mean completion time under each policy, and under Hare's rule per task."""
    steps = [max(1, round(job.seconds * max(speeds[job.model.name].values()))) for job in jobs]
    arrivals = [
        Arrival(job.at_s, JobSpec(JobId(job.name), 1, float(count), job.model.name, weight=job.weight))
        for job, count in zip(jobs, steps, strict=True)
    ]
    arrivals.sort(key=lambda arrival: arrival[0])
    found = {
        name: simulate(arrivals, cluster, parse_policy(name), LaneWorld(speeds)).summary().weighted_jct_s
        for name in policies
    }
    kinds = list(cluster.kinds)
    devices = [kinds.index(cluster.kind_of(device)) for device in range(cluster.num_devices)]
    tasks = [
        TaskJob(job.weight, job.at_s, count, 1, tuple(1.0 / speeds[job.model.name][kind] for kind in kinds))
        for job, count in zip(jobs, steps, strict=True)
    ]
    return found | {PER_TASK: weighted_jct_s(tasks, ends(tasks, devices, _SWITCH_S))}
