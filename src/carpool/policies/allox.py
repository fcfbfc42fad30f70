"""AlloX: jobs are matched to places on unlike devices so that the sum of completion times is least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.registry import register
from carpool.policies.speeds import kind_held, rate_on

_NEVER = 1e18  # seconds: a place that a job cannot take
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
        late = [job for job, kind in now if job.id not in stays and not self._place(draft, job, kind)]
        for job in [*late, *jobs]:  # whom the nodes' borders kept out, and whom a matching by count left idle
            if draft.num_free and draft.holding(job) is None and not (job.desired is not None and draft.restore(job)):
                for kind in draft.kinds_for(job) if self.gang else ():
                    if self._place(draft, job, kind):
                        break
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

    def _place(self, draft: Draft, job: Job, kind: Kind) -> bool:
        return draft.place(job, self._width(job), kinds=(kind,))

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
        mean_width = sum(self._width(job) for job in jobs) / len(jobs)
        columns: list[tuple[Kind, int]] = []
        for kind, capacity in view.cluster.capacity.items():
            num_places = max(1, int(capacity / mean_width))
            columns.extend((kind, 1 + place // num_places) for place in range(len(jobs) + num_places - 1))
        seconds = {kind: np.array([self._seconds(view, job, kind) for job in jobs]) for kind in view.cluster.kinds}
        cost = np.stack([k * seconds[kind] for kind, k in columns], axis=1)
        queues: dict[Kind, list[tuple[int, float, int, Job]]] = {kind: [] for kind in view.cluster.kinds}
        for row, column in zip(*linear_sum_assignment(np.minimum(cost, _NEVER)), strict=True):
            kind, k = columns[column]
            if seconds[kind][row] < _NEVER:
                queues[kind].append((-k, float(seconds[kind][row]), jobs[row].seq, jobs[row]))
        return {kind: [job for *_, job in sorted(queue)] for kind, queue in queues.items()}

    def _seconds(self, view: Snapshot, job: Job, kind: Kind) -> float:
        """Remaining time on devices of a kind."""
        width = self._width(job)
        if width > view.cluster.capacity[kind] or (job.spec.kinds and kind not in job.spec.kinds):
            return _NEVER
        rate = rate_on(view, job.spec, kind, width)
        remaining = view.estimates.remaining(job, view.at).mean
        if rate <= 0.0:
            return _NEVER
        return min(remaining / rate * (_STAY if kind_held(view, job) == kind else 1.0), _NEVER / 1e3)
