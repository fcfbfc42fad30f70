"""Optimus: one device per job, then one more wherever it reduces remaining run time most."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from carpool.core.draft import Draft
from carpool.core.model import Job, Kind
from carpool.core.placement import placement_rule
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.estimator_queries import devices_in_use_or_free, kind_held, kinds_of, placed_on
from carpool.policies.registry import register


@register("optimus")
@dataclass(frozen=True, slots=True)
class Optimus(Policy):
    """Reassign all devices: one per job, first come first served, then greedily.

    The next device goes to the job with the largest remaining·(t(k) − t(k+1)), t(k) being the step time on k
    devices, while that is positive. Where the estimator does not count steps, t = 1/rate and remaining is the work
    left. Jobs that keep their count keep their devices; others are placed again, smallest first. Peng et al.,
    "Optimus", EuroSys 2018.
    """

    placement: str = "emptiest"
    interval_s: float = 0.0  # above 0: also plan after this long without an arrival or completion

    def __post_init__(self) -> None:
        placement_rule(self.placement)

    def plan(self, view: Snapshot) -> Plan:
        stakes = [_Stake(view, job) for job in sorted(view.active(), key=lambda job: job.seq)]
        if not stakes:
            return Plan.NOTHING
        _deal(stakes, devices_in_use_or_free(view))
        draft = Draft(view)
        for stake in stakes:
            if stake.count != stake.held or kind_held(view, stake.job) != stake.kind:
                draft.release(stake.job)
        rule = placement_rule(self.placement)
        for stake in sorted(stakes, key=lambda stake: stake.count):
            if stake.count and draft.holding(stake.job) is None:
                placed = draft.place(stake.job, stake.count, kinds=(stake.kind,), rule=rule)
                if not placed and not (stake.job.desired is not None and draft.restore(stake.job)):
                    draft.place(stake.job, stake.job.spec.narrowest, kinds=(stake.kind,), rule=rule)
        num = sum(stake.count > 0 for stake in stakes)
        wake_at = view.at + self.interval_s if self.interval_s else None
        return draft.finish(f"{num} of {len(stakes)} jobs hold devices, by the time one more saves", wake_at=wake_at)


class _Stake:
    """A job's device count so far, and the time one more device would save."""

    __slots__ = ("_kinds", "_remaining", "_view", "count", "held", "job", "kind")

    def __init__(self, view: Snapshot, job: Job) -> None:
        self.job = job
        self.held = 0 if job.desired is None else job.desired.num_devices
        self.count = 0
        self._view = view
        self._kinds = kinds_of(view, job.spec, job.spec.narrowest)
        held = kind_held(view, job)
        if held in self._kinds:
            self._kinds.insert(0, held)
        self.kind = self._kinds[0] if self._kinds else Kind("")
        self._remaining = view.estimates.steps_left(job, view.at)

    def start(self, left: dict[Kind, int]) -> None:
        """Take the fewest devices it accepts, of the type it holds, else of the first with enough left."""
        narrowest = self.job.spec.narrowest
        kind = next((kind for kind in self._kinds if left[kind] >= narrowest), None)
        if kind is not None:
            self.kind, self.count = kind, narrowest
            left[kind] -= narrowest

    def saving(self, left: dict[Kind, int]) -> float:
        """Seconds of run time that one more device would save."""
        if not self.count or self.count >= self.job.spec.widest or not left[self.kind]:
            return 0.0
        return self._remaining * (self._step_s(self.count) - self._step_s(self.count + 1))

    def _step_s(self, count: int) -> float:
        return self._view.estimates.step_s(self.job.spec, placed_on(self._view.cluster, self.kind, count))


def _deal(stakes: list[_Stake], left: dict[Kind, int]) -> None:
    """Assign devices until one more helps no job."""
    for stake in stakes:
        stake.start(left)
    heap = [(-stake.saving(left), order, stake) for order, stake in enumerate(stakes)]
    heapify(heap)
    while heap and heap[0][0] < 0.0:
        _, order, stake = heap[0]
        if not left[stake.kind]:
            heappop(heap)
            continue
        stake.count += 1
        left[stake.kind] -= 1
        heapreplace(heap, (-stake.saving(left), order, stake))
