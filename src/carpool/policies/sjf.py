"""Shortest job first: waiting jobs start in order of their length and keep their devices to the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.estimates import Declared, Estimator
from carpool.core.model import Job
from carpool.core.placing import placing
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.speeds import best_rate, by_rate, seconds_left


@register("sjf")
@dataclass(frozen=True, slots=True)
class Sjf(Policy):
    """Start the waiting job with the least remaining / (rate on its fastest kind), on the fastest kind that is free.

    Not preemptive. The head of the queue blocks unless `bypass` lets longer jobs pass it.
    """

    bypass: bool = False
    placement: str = "consolidated"

    def waiting_key(self, job: Job, estimates: Estimator) -> float:
        """Declared lengths are seconds on any kind; other estimates are asked when the kinds are known, in `plan`."""
        return job.remaining_at(job.as_of) if isinstance(estimates, Declared) else 0.0

    def plan(self, view: Snapshot) -> Plan:
        """Give free devices to the shortest for as long as it fits."""
        if not view.waiting or view.occupancy.num_free < view.waiting.narrowest:
            return Plan.NOTHING
        rule = placing(self.placement)
        draft = Draft(view)
        started = 0
        for job in self._shortest_first(draft):
            if draft.place(job, kinds=[kind for _, kind in by_rate(view, job.spec)], rule=rule):
                started += 1
            elif not self.bypass or not draft.num_free:
                break
        return draft.finish(f"{started} shortest fit") if started else Plan.NOTHING

    def _shortest_first(self, draft: Draft) -> Iterator[Job]:
        view = draft.view
        if isinstance(view.estimates, Declared):
            yield from draft.waiting()
            return
        waiting = [view.jobs[job] for job in view.waiting]
        yield from sorted(waiting, key=lambda job: (seconds_left(view, job, best_rate(view, job.spec)), job.seq))
