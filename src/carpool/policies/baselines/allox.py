"""AlloX: matches jobs to slots on heterogeneous devices to minimize the sum of completion times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.estimator_queries import best_rate, by_rate, kind_held, kinds_of, rate_on, seconds_left
from carpool.policies.registry import register

_UNKNOWN_S = 1e12  # stands for an unknown length
_STAY = 1.0 - 1e-9  # cost factor of the current device, so that ties move no job
_TIE = 1e-11  # added to the cost, so that of two equal jobs the one submitted first goes first


class _Place(NamedTuple):
    """The k-th position from the end on a device of a type, which is free after `wait_s`."""

    kind: int
    device: int
    k: int
    wait_s: float


@register("allox")
@dataclass(frozen=True, slots=True)
class Allox(Policy):
    """Match jobs to (device, k-th position from the end); jobs in first position on a free device run.

    In the k-th position from the end a job delays itself and k - 1 others, so it costs k x remaining / rate, plus
    the time until the device is free. The least sum is a bipartite matching. Le et al., "AlloX", EuroSys 2020.

    Running jobs are matched like waiting ones, or, with `preempt=false`, run to completion. The matching is for
    single devices; jobs that request more and accept one get one. With `gang=true` (ours) every job keeps its size,
    a type of N devices counts as N / (mean size) devices, and free devices are filled with the shortest jobs. The
    head of the queue does not block.
    """

    gang: bool = False
    preempt: bool = True

    def plan(self, view: Snapshot) -> Plan:
        jobs = [job for job in view.active() if self.preempt or job.desired is None]
        if not jobs or (not self.preempt and not view.occupancy.num_free):
            return Plan.NOTHING
        jobs.sort(key=lambda job: job.seq)
        draft = Draft(view)
        now = [
            (job, kind) for kind, first in self._matched(view, jobs).items() for job in self._fitting(view, kind, first)
        ]
        stays = {job.id for job, kind in now if kind_held(view, job) == kind}
        for job in jobs:
            if job.id not in stays:
                draft.release(job)
        for job, kind in now:
            if job.id not in stays:
                draft.place(job, self._width(job), kinds=(kind,))
        if self.gang:
            self._fill(draft, jobs)
        plan = draft.finish(f"{len(now)} of {len(jobs)} jobs matched to run now")
        return plan if plan.changes else Plan.NOTHING

    def _fill(self, draft: Draft, jobs: list[Job]) -> None:
        """Start gangs that were not matched, shortest first, where they fit."""
        rest = [job for job in jobs if draft.holding(job) is None]
        rest.sort(key=lambda job: (seconds_left(draft.view, job, best_rate(draft.view, job.spec)), job.seq))
        for job in rest:
            if not draft.num_free:
                return
            if job.desired is None or not draft.restore(job):
                draft.place(job, kinds=[kind for _, kind in by_rate(draft.view, job.spec)])

    def _width(self, job: Job) -> int:
        if self.gang:
            return job.spec.devices
        if job.spec.narrowest > 1:
            raise InputError(
                f"job {job.id!r} needs {job.spec.narrowest} devices; allox matches jobs to single devices",
                way_out="Use allox:gang=true, or let the job run on one device (min_devices = 1).",
            )
        return 1

    def _fitting(self, view: Snapshot, kind: Kind, first: list[Job]) -> list[Job]:
        left = view.occupancy.free_devices[kind]
        if self.preempt:
            left += sum(
                job.desired.num_devices for job in view.running() if job.desired and kind_held(view, job) == kind
            )
        now: list[Job] = []
        for job in first:
            if self._width(job) <= left:
                left -= self._width(job)
                now.append(job)
        return now

    def _matched(self, view: Snapshot, jobs: list[Job]) -> dict[Kind, list[Job]]:
        """Jobs in first positions on free devices of each type, shortest first."""
        kinds = view.cluster.kinds
        seconds = np.array([[self._seconds(view, job, kind) for kind in kinds] for job in jobs])
        seconds *= 1.0 + _TIE * np.arange(len(jobs))[:, None]
        possible = np.flatnonzero(np.isfinite(seconds).any(axis=1))
        if not len(possible):
            return {}
        places = self._places(view, [jobs[row] for row in possible])
        number, _, nth, wait_s = np.array(places).T
        cost = seconds[possible][:, number.astype(int)] * nth + wait_s
        free: dict[int, list[tuple[int, float, int]]] = {}  # kind -> (place from the end, seconds, job) on free devices
        for row, column in zip(*linear_sum_assignment(cost), strict=True):
            place, job = places[int(column)], int(possible[row])
            if place.wait_s == 0.0:
                free.setdefault(place.kind, []).append((-place.k, float(seconds[job, place.kind]), job))
        num_free = Counter([place.kind for place in places if place.k == 1 and place.wait_s == 0.0])
        return {kinds[kind]: [jobs[job] for *_, job in sorted(queue)[: num_free[kind]]] for kind, queue in free.items()}

    def _places(self, view: Snapshot, jobs: list[Job]) -> list[_Place]:
        """All useful positions: on each device one per job, within limits."""
        mean_width = sum(self._width(job) for job in jobs) / len(jobs)
        places: list[_Place] = []
        for number, (kind, capacity) in enumerate(view.cluster.capacity.items()):
            waits: list[float] = []
            for job in view.running() if not self.preempt else ():
                if kind_held(view, job) == kind and job.desired is not None:
                    count = max(1, round(job.desired.num_devices / mean_width))
                    waits += [seconds_left(view, job, job.believed if job.is_starting else job.rate)] * count
            num_devices = max(1, int(capacity / mean_width))
            waits = sorted(waits, reverse=True)[:num_devices]
            waits = [min(wait_s, _UNKNOWN_S) for wait_s in waits] + [0.0] * (num_devices - len(waits))
            most = min(len(jobs), 1 + 2 * -(-len(jobs) // num_devices))
            places += [_Place(number, d, k, wait_s) for d, wait_s in enumerate(waits) for k in range(1, most + 1)]
        return places

    def _seconds(self, view: Snapshot, job: Job, kind: Kind) -> float:
        """Remaining time on devices of a type; infinite where the job cannot run."""
        width = self._width(job)
        if kind not in kinds_of(view, job.spec, width):
            return inf
        rate = rate_on(view, job.spec, kind, width)
        seconds = min(view.estimates.remaining(job, view.at).mean, _UNKNOWN_S) / rate if rate > 0.0 else inf
        return seconds * _STAY if kind_held(view, job) == kind else seconds
