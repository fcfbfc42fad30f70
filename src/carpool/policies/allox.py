"""AlloX: jobs are matched to places on unlike devices so that the sum of completion times is least."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.optimize import linear_sum_assignment

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.speeds import by_rate, kind_held, kinds_of, rate_on

_UNKNOWN_S = 1e12  # stands for a length that nobody knows
_STAY = 1.0 - 1e-9  # what a job pays where it is: ties move nobody


@register("allox")
@dataclass(frozen=True, slots=True)
class Allox(Policy):
    """At every plan, match all jobs to (device, k-th place from the end); who stands first on a device runs.

    In the k-th place from the end a job delays itself and the k - 1 behind it, so it costs k x remaining / rate (and
    the time it has waited, the same in every place). The least sum is a bipartite matching. Like devices are one
    column each: a kind of N devices has N places of every k, and its jobs run shortest first. Le et al., "AlloX",
    EuroSys 2020.

    Jobs change devices only when a plan is made; with `preempt=false` those that run stay to their end. The matching
    is for jobs on single devices; those that ask for more and accept one get one. With `gang=true` (ours) every job
    keeps its width, a kind of N devices counts as N / (mean width) places, and the jobs of a kind start in the order
    of the matching wherever they fit. The head of the queue does not block.
    """

    gang: bool = False
    preempt: bool = True

    def plan(self, view: Snapshot) -> Plan:
        """Match, then let everybody who is to run now have its device."""
        jobs = [job for job in view.active() if self.preempt or job.desired is None]
        if not jobs or (not self.preempt and not view.occupancy.num_free):
            return Plan.NOTHING
        jobs.sort(key=lambda job: job.seq)
        draft = Draft(view)
        now = [
            (job, kind) for kind, queue in self._matched(view, jobs).items() for job in self._first(draft, kind, queue)
        ]
        stays = {job.id for job, kind in now if kind_held(view, job) == kind}
        for job in jobs:
            if job.id not in stays:
                draft.release(job)
        for job, kind in now:
            if job.id not in stays:
                draft.place(job, self._width(job), kinds=(kind,))
        for job in jobs if self.gang else ():  # whom the borders of nodes kept out, and what a matching by count left
            if draft.num_free and draft.holding(job) is None and (job.desired is None or not draft.restore(job)):
                draft.place(job, kinds=[kind for _, kind in by_rate(view, job.spec)])
        plan = draft.finish(f"{len(now)} of {len(jobs)} jobs matched to a first place")
        return plan if plan.changes else Plan.NOTHING

    def _width(self, job: Job) -> int:
        """Devices a job gets."""
        if self.gang:
            return job.spec.devices
        if job.spec.narrowest > 1:
            raise InputError(
                f"job {job.id!r} needs {job.spec.narrowest} devices; allox matches jobs to single devices",
                way_out="Use allox:gang=true, or let the job run on one device (min_devices = 1).",
            )
        return 1

    def _first(self, draft: Draft, kind: Kind, queue: list[Job]) -> list[Job]:
        """Those of a kind's queue that run now, by count."""
        left = draft.view.occupancy.free_devices[kind]
        if self.preempt:
            for job in draft.view.running():
                if kind_held(draft.view, job) == kind and job.desired is not None:
                    left += job.desired.num_devices
        now: list[Job] = []
        for job in queue:
            if self._width(job) <= left:
                left -= self._width(job)
                now.append(job)
        return now

    def _matched(self, view: Snapshot, jobs: list[Job]) -> dict[Kind, list[Job]]:
        """The jobs of each kind in the order of their places, first place first."""
        seconds = np.array([[self._seconds(view, job, kind) for kind in view.cluster.kinds] for job in jobs])
        possible = np.isfinite(seconds).any(axis=1)
        rows = [job for job, fits in zip(jobs, possible, strict=True) if fits]
        queues: dict[Kind, list[tuple[int, float, int, Job]]] = {kind: [] for kind in view.cluster.kinds}
        if rows:
            seconds = seconds[possible]
            columns = self._columns(view, rows)
            cost = np.stack([k * seconds[:, number] for number, k in columns], axis=1)
            for row, column in zip(*linear_sum_assignment(cost), strict=True):
                number, k = columns[column]
                job = rows[row]
                queues[view.cluster.kinds[number]].append((-k, float(seconds[row, number]), job.seq, job))
        return {kind: [job for *_, job in sorted(queue)] for kind, queue in queues.items()}

    def _columns(self, view: Snapshot, jobs: list[Job]) -> list[tuple[int, int]]:
        """(number of the kind, place from the end) of every place there may be use for."""
        mean_width = sum(self._width(job) for job in jobs) / len(jobs)
        columns: list[tuple[int, int]] = []
        for number, capacity in enumerate(view.cluster.capacity.values()):
            num_places = max(1, int(capacity / mean_width))
            columns.extend((number, 1 + place // num_places) for place in range(len(jobs) + num_places - 1))
        return columns

    def _seconds(self, view: Snapshot, job: Job, kind: Kind) -> float:
        """Remaining time on devices of a kind; infinite where the job cannot run."""
        width = self._width(job)
        if kind not in kinds_of(view, job.spec, width):
            return inf
        rate = rate_on(view, job.spec, kind, width)
        seconds = min(view.estimates.remaining(job, view.at).mean, _UNKNOWN_S) / rate if rate > 0.0 else inf
        return seconds * _STAY if kind_held(view, job) == kind else seconds
