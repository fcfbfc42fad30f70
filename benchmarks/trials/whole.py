"""Policy for benchmarks: one job after another on all devices of any type."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Allocation
from carpool.core.policy import Plan, Policy, Snapshot


@dataclass(frozen=True, slots=True)
class Whole(Policy):
    """The policies that ship give a job devices of one kind; this one gives the head of the queue every device."""

    def plan(self, view: Snapshot) -> Plan:
        """Start the next job when nothing runs."""
        devices = [device for node in view.cluster.nodes for device in node.devices]
        if not view.waiting or view.occupancy.num_free < len(devices):
            return Plan.NOTHING
        draft = Draft(view)
        job = next(iter(draft.waiting()))
        draft.assign(job, Allocation.of(*devices))
        return draft.finish("the next in the queue has all devices")
