"""Sched_Homo: Hare's order of jobs under the belief that all devices are equally fast."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Allocation, Job
from carpool.core.placing import placing
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.speeds import rate_on, seconds_left


@register("sched-homo")
@dataclass(frozen=True, slots=True)
class SchedHomo(Policy):
    """Start waiting jobs by R / weight, R = remaining work over the mean of the rates on all kinds; no preemption.

    Devices are taken in the order of their numbers, whatever their kind: the first kind with room, or, with
    `mixed=true`, any free devices, so that a gang goes at the pace of its slowest. Later jobs pass one that does not
    fit unless `bypass=false`. The rule is our reading of the baseline in the Hare study.
    """

    bypass: bool = True
    mixed: bool = False
    placement: str = "consolidated"

    def plan(self, view: Snapshot) -> Plan:
        """Give free devices out in order."""
        if not view.waiting or view.occupancy.num_free < view.waiting.narrowest:
            return Plan.NOTHING
        waiting = [view.jobs[job] for job in view.waiting]
        draft = Draft(view)
        started = 0
        for job in sorted(waiting, key=lambda job: (self._key(view, job), job.seq)):
            if self._place(draft, job):
                started += 1
            elif not self.bypass or not draft.num_free:
                break
        return draft.finish(f"{started} shortest per weight fit, kinds not looked at") if started else Plan.NOTHING

    def _key(self, view: Snapshot, job: Job) -> float:
        rates = [
            rate_on(view, job.spec, kind)
            for kind in job.spec.kinds or view.cluster.kinds
            if kind in view.cluster.capacity
        ]
        return seconds_left(view, job, sum(rates) / max(1, len(rates))) / job.spec.weight

    def _place(self, draft: Draft, job: Job) -> bool:
        if draft.place(job, rule=placing(self.placement)):
            return True
        if not self.mixed or job.spec.kinds or draft.num_free < job.spec.devices:
            return False
        free = [
            device
            for node in draft.view.cluster.nodes
            for device in node.devices
            if draft.occupancy.free_mask(node.id) >> (device - node.devices.start) & 1
        ]
        draft.assign(job, Allocation.of(*free[: job.spec.devices]))
        return True
