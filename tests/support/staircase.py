"""A policy for tests: one device, all devices between two steps, one device again."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Allocation
from carpool.core.policy import Plan, Policy, Snapshot


@dataclass(frozen=True)
class Staircase(Policy):
    """Run a single job on every device that is there while its steps are in [first, last), else on one."""

    first: int = 0
    last: int = 1_000_000

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        nodes = [node for node in view.cluster.nodes if node.id not in view.occupancy.lost]
        there = [device for node in nodes for device in node.devices]
        for job in view.active():
            kept = [] if job.desired is None else [device for device in job.desired.devices() if device in there]
            wanted = there if self.first <= job.done < self.last else [*kept, *there][:1]
            if wanted:
                draft.assign(job, Allocation.of(*wanted))
        return draft.finish("a step of the staircase", wake_at=view.at + 0.1)
