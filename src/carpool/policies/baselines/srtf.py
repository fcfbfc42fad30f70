"""Shortest remaining time first, preemptive: plain (`srtf`) and by remaining time over weight (`wsrtf`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.model import Job, Kind
from carpool.core.placement import placement_rule
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import Demand, Entry
from carpool.policies.baselines.preemption import PreemptionResult, among, arrange, preempt
from carpool.policies.estimator_queries import by_rate, kind_held, seconds_left
from carpool.policies.registry import register

_TIE_S = 1e-6  # a waiting job must be shorter by more than this, so that rounding swaps no equal jobs


@register("wsrtf")
@dataclass(frozen=True, slots=True)
class Wsrtf(Policy):
    """The jobs with the least remaining seconds / weight hold the devices.

    Seconds are remaining work over the rate on the job's fastest type, so a job's rank does not depend on where it
    runs. Each job gets the fastest type that jobs before it leave; a running job moves to another type only if that
    is more than `stay` times as fast. The head of the queue does not block.
    """

    weighted: ClassVar[bool] = True
    stay: float = 1.0
    placement: str = "consolidated"

    def plan(self, view: Snapshot) -> Plan:
        if not view.waiting and len(view.cluster.kinds) == 1:
            return Plan.NOTHING
        draft = Draft(view)
        rates = {job.id: by_rate(view, job.spec) for job in view.active()}
        ranks: dict[bool, list[Entry]] = {True: [], False: []}
        for job in view.active():
            speeds = rates[job.id]
            seconds = seconds_left(view, job, speeds[0][0] if speeds else 0.0)
            if job.desired is None:
                seconds += _TIE_S
            ranks[job.desired is None].append(
                (seconds / job.spec.weight if self.weighted else seconds, job.seq, job.id)
            )
        waiting, running = sorted(ranks[True]), sorted(ranks[False])
        rule = placement_rule(self.placement)
        if len(view.cluster.kinds) == 1:
            outcome = preempt(draft, among(waiting, view.jobs), lambda entry: running, rule=rule)
        else:
            ordered = [view.jobs[job] for _, _, job in sorted(waiting + running)]
            outcome = arrange(draft, ordered, lambda job: self._preferred(view, job, rates[job.id]), rule=rule)
        return self._finished(draft, outcome)

    def _preferred(self, view: Snapshot, job: Job, speeds: list[tuple[float, Kind]]) -> list[Kind]:
        """Fastest type first; the one it runs on counts `stay` times and wins ties."""
        held = kind_held(view, job)
        if held is None:
            return [kind for _, kind in speeds]
        return [
            kind
            for _, kind in sorted(speeds, key=lambda s: (-s[0] * (self.stay if s[1] == held else 1.0), s[1] != held))
        ]

    def _finished(self, draft: Draft, outcome: PreemptionResult) -> Plan:
        if not outcome:
            return Plan.NOTHING
        return draft.finish(f"least remaining time{' per weight' if self.weighted else ''}: {outcome.words()}")


@register("srtf")
@dataclass(frozen=True, slots=True)
class Srtf(Wsrtf):
    """Wsrtf with equal weights, which lets the scheduler keep the order of jobs.

    With declared lengths, a waiting job's remaining seconds and a running job's expected end do not change, and a
    waiting job is shorter than a running one when its remaining seconds are less than end - now.
    """

    weighted: ClassVar[bool] = False
    keeps_running_order: ClassVar[bool] = True

    def waiting_key(self, job: Job, estimates: Estimator) -> float:
        return job.remaining_at(job.as_of) if isinstance(estimates, DeclaredEstimator) else 0.0

    def running_key(self, job: Job, estimates: Estimator) -> float:
        rate = job.believed if job.is_starting else job.rate
        return job.as_of + job.remaining_at(job.as_of) / (rate or 1.0)

    def plan(self, view: Snapshot) -> Plan:
        if len(view.cluster.kinds) > 1 or not isinstance(view.estimates, DeclaredEstimator):
            return Wsrtf.plan(self, view)
        head, tail = view.waiting.head, view.running_jobs.tail
        if head is None:
            return Plan.NOTHING
        shift = view.at + _TIE_S
        if view.occupancy.num_free < view.waiting.narrowest and (tail is None or head[0] + shift > tail[0]):
            return Plan.NOTHING
        draft = Draft(view)

        def waiting(refused: set[Demand]) -> Iterator[Entry]:
            for seconds, seq, job in view.waiting.entries(refused):
                yield seconds + shift, seq, job

        outcome = preempt(
            draft, waiting, lambda entry: list(view.running_jobs.entries()), rule=placement_rule(self.placement)
        )
        return self._finished(draft, outcome)
