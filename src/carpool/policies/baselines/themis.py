"""Themis: leases devices to the jobs with the worst finish-time fairness."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job
from carpool.core.placement import placement_rule
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import Entry, in_submission_order
from carpool.policies.baselines.preemption import among, preempt
from carpool.policies.estimator_queries import best_rate, by_rate, seconds_left
from carpool.policies.registry import register

_ROUNDING = 1e-9  # leases are multiples of a float


@register("themis")
@dataclass(frozen=True, slots=True)
class Themis(Policy):
    """Free devices, and those with an expired lease, go to the jobs with the worst rho = T_shared / T_alone.

    T_shared is the time from submission to completion if the job runs from now on, T_alone its whole length, both at
    the rate on its fastest type. The worst `fraction` of waiting and expired jobs comes first; among them devices go
    where the product of 1 / rho gains most per device, that is by log((rho + lease / T_alone) / rho) / size. The others
    follow, ordered by rho. A lease lasts `lease_s` from the start and is renewed if no other job gets the devices. The
    head of the queue does not block. Our form, without auctions, of Mahajan et al., "Themis", NSDI 2020.
    """

    fraction: float = 0.2
    lease_s: float = 1200.0
    placement: str = "consolidated"

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0 or self.lease_s <= 0.0:
            raise InputError(
                f"fraction {self.fraction} must be in (0, 1] and lease_s {self.lease_s} above 0",
                way_out="Such as themis:fraction=0.2:lease_s=1200.",
            )

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting:
            return Plan.NOTHING
        expired = [job for job in view.running() if self._is_over(view, job)]
        draft = Draft(view)
        if expired or view.occupancy.num_free >= view.waiting.narrowest:
            waiting = [view.jobs[job] for job in view.waiting]
            ranks = self._ranked(view, [*waiting, *expired])
            offers = sorted((ranks[job.id], job.seq, job.id) for job in waiting)
            lessees: list[Entry] = sorted((ranks[job.id], job.seq, job.id) for job in expired)
            outcome = preempt(
                draft,
                among(offers, view.jobs),
                lambda entry: lessees,
                rule=placement_rule(self.placement),
                kinds=lambda job: [kind for _, kind in by_rate(view, job.spec)],
            )
            reason = f"worst finish-time fairness first: {outcome.words()}" if outcome else ""
            ends = [view.at + self.lease_s for _ in outcome.started]
        else:
            reason, ends = "", []
        ends += [self._lease_end(view, job) for job in view.running() if draft.holding(job) is not None]
        return draft.finish(reason, wake_at=min(ends, default=None))

    def _ranked(self, view: Snapshot, jobs: list[Job]) -> dict[str, int]:
        """Jobs by fairness: the worst fraction by what waiting costs them, then the rest."""
        rho: dict[str, float] = {}
        price: dict[str, float] = {}
        for job in jobs:
            rate = best_rate(view, job.spec)
            left = seconds_left(view, job, rate)
            alone = left + (job.done_at(view.at) / rate if rate > 0.0 else 0.0)
            known = 0.0 < alone < float("inf")
            rho[job.id] = (view.at - job.submitted_at + left) / alone if known else 1.0
            price[job.id] = log(1.0 + self.lease_s / (rho[job.id] * alone)) / job.spec.devices if known else 0.0
        worst_first = sorted(jobs, key=lambda job: (-rho[job.id], job.seq))
        offered = ceil(self.fraction * len(jobs))
        first = sorted(worst_first[:offered], key=lambda job: (-price[job.id], job.seq))
        ordered = [*first, *worst_first[offered:]]
        ranks = in_submission_order(ordered, range(len(ordered)), key=int)
        return {job.id: rank for job, rank in zip(ordered, ranks, strict=True)}

    def _is_over(self, view: Snapshot, job: Job) -> bool:
        leases = (view.at - job.since) / self.lease_s
        return leases > 0.5 and abs(leases - round(leases)) <= _ROUNDING * max(1.0, leases)

    def _lease_end(self, view: Snapshot, job: Job) -> float:
        end = job.since + (floor((view.at - job.since) / self.lease_s + _ROUNDING) + 1) * self.lease_s
        return end if end > view.at else end + self.lease_s
