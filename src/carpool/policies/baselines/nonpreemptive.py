"""Non-preemptive policies: FIFO, SJF, and Sched_Homo (shortest per weight on averaged speeds)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.model import Allocation, Job
from carpool.core.placement import placement_rule
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.estimator_queries import best_rate, by_rate, rate_on, seconds_left
from carpool.policies.registry import register


@register("fifo")
@dataclass(frozen=True, slots=True)
class Fifo(Policy):
    """Start waiting jobs in order; the head of the queue blocks unless `bypass` lets later jobs pass."""

    bypass: bool = False
    placement: str = "consolidated"

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting or view.occupancy.num_free < view.waiting.narrowest:
            return Plan.NOTHING
        draft = Draft(view)
        started = draft.fill(placement_rule(self.placement), bypass=self.bypass)
        return draft.finish(f"started the next {started} in the queue") if started else Plan.NOTHING


@register("sjf")
@dataclass(frozen=True, slots=True)
class Sjf(Policy):
    """Start the waiting job with the least remaining / (rate on its fastest type), on the fastest free type.

    Not preemptive. The head of the queue blocks unless `bypass` lets longer jobs pass.
    """

    bypass: bool = False
    placement: str = "consolidated"

    def waiting_key(self, job: Job, estimates: Estimator) -> float:
        """Declared lengths are seconds on any type; other estimates are used in `plan`, where the types are known."""
        return job.remaining_at(job.as_of) if isinstance(estimates, DeclaredEstimator) else 0.0

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting or view.occupancy.num_free < view.waiting.narrowest:
            return Plan.NOTHING
        rule = placement_rule(self.placement)
        draft = Draft(view)
        started = 0
        for job in self._shortest_first(draft):
            if draft.place(job, kinds=[kind for _, kind in by_rate(view, job.spec)], rule=rule):
                started += 1
            elif not self.bypass or not draft.num_free:
                break
        return draft.finish(f"started the {started} shortest") if started else Plan.NOTHING

    def _shortest_first(self, draft: Draft) -> Iterator[Job]:
        view = draft.view
        if isinstance(view.estimates, DeclaredEstimator):
            yield from draft.waiting()
            return
        waiting = [view.jobs[job] for job in view.waiting]
        yield from sorted(waiting, key=lambda job: (seconds_left(view, job, best_rate(view, job.spec)), job.seq))


@register("sched-homo")
@dataclass(frozen=True, slots=True)
class SchedHomo(Policy):
    """Start waiting jobs by R / weight, R = remaining work over the mean rate on all device types; no preemption.

    Devices are taken in order of their numbers, whatever their type: the first type with room, or, with
    `mixed=true`, any free devices, so that a gang runs at the pace of its slowest. Later jobs pass one that does
    not fit unless `bypass=false`. Our reading of the baseline in the Hare study.
    """

    bypass: bool = True
    mixed: bool = False
    placement: str = "consolidated"

    def plan(self, view: Snapshot) -> Plan:
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
        return (
            draft.finish(f"started the {started} shortest per weight, on any device type") if started else Plan.NOTHING
        )

    def _key(self, view: Snapshot, job: Job) -> float:
        rates = [
            rate_on(view, job.spec, kind)
            for kind in job.spec.kinds or view.cluster.kinds
            if kind in view.cluster.capacity
        ]
        return seconds_left(view, job, sum(rates) / max(1, len(rates))) / job.spec.weight

    def _place(self, draft: Draft, job: Job) -> bool:
        if draft.place(job, rule=placement_rule(self.placement)):
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
