"""Multifactor priority with conservative backfill, as in common batch queues: age, fair share, size and priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from carpool.core.draft import Draft
from carpool.core.model import Job
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.estimator_queries import best_rate, seconds_left
from carpool.policies.registry import register

Usage = dict[str, float]  # by user


@register("multifactor")
@dataclass(frozen=True, slots=True)
class Multifactor(Policy):
    """Start waiting jobs by priority = Σ weight · factor; a later one passes only if it delays no reservation.

    The factors are between 0 and 1: age (time waited over `max_age_s`), fair share (2^(−usage over equal share), device
    time halving every `half_life_s`), size (devices over all devices) and qos (the job's priority, 0 to 10). Running
    jobs keep their devices. The weights are our choice within what sites publish, not a system's default.
    """

    age: float = 1000.0
    fair_share: float = 2000.0
    size: float = 200.0
    qos: float = 4000.0
    max_age_s: float = 7 * 86_400.0
    half_life_s: float = 7 * 86_400.0
    depth: int = 100  # waiting jobs that get a reservation

    def plan(self, view: Snapshot) -> Plan:
        usage, held = self._usage(view)
        draft = Draft(view)
        started = self._start(draft, usage) if view.waiting and view.occupancy.num_free else 0
        after = _held_by_user(view, draft)
        if after == held and not started:
            return Plan.NOTHING
        note = {"at": view.at, "usage": usage, "held": after}
        return draft.finish(f"started {started} by priority, behind reservations", note=note)

    def _usage(self, view: Snapshot) -> tuple[Usage, Usage]:
        """Decayed device-seconds of each user, and the devices held since the last note."""
        note = cast(Mapping[str, Any], view.note or {"at": view.at, "usage": {}, "held": {}})
        elapsed, held = view.at - float(note["at"]), {str(user): float(n) for user, n in note["held"].items()}
        kept = 2.0 ** (-elapsed / self.half_life_s)
        usage = {str(user): float(used) * kept for user, used in note["usage"].items()}
        for user, devices in held.items():
            usage[user] = usage.get(user, 0.0) + devices * elapsed
        return usage, held

    def _priority(self, view: Snapshot, job: Job, usage: Usage) -> float:
        total = sum(usage.values())
        users = len(usage.keys() | {view.jobs[name].spec.user for name in view.waiting})
        used = users * usage.get(job.spec.user, 0.0) / total if total > 0.0 else 0.0
        return (
            self.age * min(1.0, (view.at - job.since) / self.max_age_s)
            + self.fair_share * float(2.0**-used)
            + self.size * job.spec.devices / max(1, view.cluster.num_devices)
            + self.qos * min(10, max(0, job.spec.priority)) / 10.0
        )

    def _start(self, draft: Draft, usage: Usage) -> int:
        """Reserve devices for waiting jobs in order of priority, and start those whose turn is now."""
        view = draft.view
        waiting = [view.jobs[name] for name in view.waiting]
        priority = {job.id: self._priority(view, job, usage) for job in waiting}
        waiting.sort(key=lambda job: (-priority[job.id], job.seq))
        profile = _Profile(view)
        started = 0
        for job in waiting[: self.depth]:
            seconds = seconds_left(view, job, best_rate(view, job.spec))
            fits = draft.find(job) is not None  # free devices may be on too many nodes
            begin = profile.reserve(job.spec.devices, seconds, 0 if fits else 1)
            started += begin == view.at and draft.place(job)
            if not draft.num_free:
                break
        return started


class _Profile:
    """Free devices from now on, device types counted alike."""

    def __init__(self, view: Snapshot) -> None:
        ends: dict[float, float] = {view.at: float(view.occupancy.num_free)}
        for job in view.running():
            assert job.desired is not None
            end = view.at + seconds_left(view, job, job.rate or best_rate(view, job.spec))
            if end < inf:
                ends[end] = ends.get(end, 0.0) + job.desired.num_held
        self._times = sorted(ends)
        self._free: list[float] = []
        for time in self._times:
            self._free.append(ends[time] + (self._free[-1] if self._free else 0.0))

    def reserve(self, devices: int, seconds: float, first: int) -> float:
        """The earliest time from `first` on at which `devices` are free for `seconds`; infinite if there is none."""
        for place in range(first, len(self._times)):
            begin = self._times[place]
            end = begin + seconds
            span = [spot for spot in range(place, len(self._times)) if self._times[spot] < end]
            if all(self._free[spot] >= devices for spot in span):
                self._take(place, end, devices)
                return begin
        return inf

    def _take(self, place: int, end: float, devices: int) -> None:
        if end < inf and end not in self._times:
            after = next((spot for spot, time in enumerate(self._times) if time > end), len(self._times))
            self._times.insert(after, end)
            self._free.insert(after, self._free[after - 1])
        for spot in range(place, len(self._times)):
            if self._times[spot] < end:
                self._free[spot] -= devices


def _held_by_user(view: Snapshot, draft: Draft) -> Usage:
    held: Usage = {}
    for job in [*view.running(), *[view.jobs[name] for name in draft.changes]]:
        allocation = draft.holding(job)
        if allocation is not None:
            held[job.spec.user] = held.get(job.spec.user, 0.0) + allocation.num_held
    return held
