"""First in, first out: jobs start in order of submission on the devices they ask for and keep them to the end."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.placing import placing
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register


@register("fifo")
@dataclass(frozen=True, slots=True)
class Fifo(Policy):
    """Start waiting jobs in order; the head of the queue blocks unless `bypass` lets later jobs pass it."""

    bypass: bool = False
    placement: str = "consolidated"

    def plan(self, view: Snapshot) -> Plan:
        """Give free devices to the head of the queue for as long as it fits."""
        if not view.waiting or view.occupancy.num_free < view.waiting.narrowest:
            return Plan.NOTHING
        draft = Draft(view)
        started = draft.fill(placing(self.placement), bypass=self.bypass)
        return draft.finish(f"the next {started} in the queue fit") if started else Plan.NOTHING
