"""Hare as published: the relaxation orders jobs, and each starts on the first free devices."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Allocation, DeviceId, Job, JobId
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import in_submission_order
from carpool.policies.gavel.rounds import capacity_of
from carpool.policies.hare.policy import demand_of
from carpool.policies.hare.relaxation import solve
from carpool.policies.registry import register


@register("hare-literal")
@dataclass(frozen=True, slots=True)
class HareLiteral(Policy):
    """Each job in the order of the relaxation gets the first available devices, of any type.

    "Decide the scheduling ordering of tasks according to the solution of the relaxed problem; greedily assign tasks
    to GPUs with the earliest available time" (Hare). Jobs keep their devices to the end, lower numbers count as
    available earlier, and a job takes as many as are free, up to its size. Types are ignored, as published; `hare`
    changes that. Kept for comparison.
    """

    intervals: int = 6  # of the relaxation, which is asked for an order only

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting or not view.occupancy.num_free:
            return Plan.NOTHING
        order = self._order(view)
        draft = Draft(view)
        started = 0
        for job in sorted([view.jobs[job] for job in view.waiting], key=lambda job: (order.get(job.id, 0.0), job.seq)):
            free = _free(draft, job)
            if len(free) >= job.spec.narrowest:
                draft.assign(job, Allocation.of(*free[: job.spec.widest]))
                started += 1
            elif not draft.num_free:
                break
        return (
            draft.finish(f"started {started} in the order of the relaxation, on the first free devices")
            if started
            else Plan.NOTHING
        )

    def _order(self, view: Snapshot) -> dict[JobId, float]:
        """Mean time at which the relaxation does each job's work."""
        jobs, demand = demand_of(view, capacity_of(view))
        if not jobs:
            return {}
        found = solve(demand, self.intervals)
        middle = found.mean_s + demand.shortest_s / 2.0 if found.optimal else demand.work / demand.weights
        at = in_submission_order(jobs, middle.tolist(), float)
        return {job.id: when for job, when in zip(jobs, at, strict=True)}


def _free(draft: Draft, job: Job) -> list[DeviceId]:
    """Free devices the job may use, in ascending order."""
    allowed = frozenset(draft.kinds_for(job))
    cluster, occupancy = draft.view.cluster, draft.occupancy
    return [
        DeviceId(device)
        for node in cluster.nodes
        if (mask := occupancy.free_mask(node.id))
        for bank in node.banks
        if bank.kind in allowed
        for device in bank.devices
        if mask >> (device - node.devices.start) & 1
    ]
