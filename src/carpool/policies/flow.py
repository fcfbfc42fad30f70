"""When the jobs of a device will end: predicted from which jobs share it, until one after another is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple

from carpool.core.model import DeviceId, Job, JobId, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Placement
from carpool.policies.batch_tuning import best_alone
from carpool.policies.share_search import Setting, Tenant, speeds
from carpool.policies.sharing import Likeness, likeness

_LEAST = 1e-9
_UNKNOWN_S = 60.0  # left to a job of unknown length that has not run yet; later as much as it has run

Pattern = tuple[tuple[Likeness, Setting], ...]


class Guest(NamedTuple):
    """A job on a device with the setting it has, or would have, there."""

    job: Job
    setting: Setting


@dataclass(slots=True)
class Flow:
    """Answers for one snapshot; what was asked once is not asked again."""

    view: Snapshot
    tuned: bool = True  # whether batch sizes are
    virtual: float = inf  # what the equal caps of a device sum to
    _speeds: dict[tuple[Kind, Pattern], list[float]] = field(default_factory=dict)
    _left: dict[tuple[JobId, Kind], float] = field(default_factory=dict)
    _starts: dict[tuple[Kind, Likeness, object], int] = field(default_factory=dict)

    def left_s(self, job: Job, kind: Kind) -> float:
        """Seconds the job still needs alone on a device of the kind at its own batch."""
        key = (job.id, kind)
        if key not in self._left:
            estimates, at = self.view.estimates, self.view.at
            rate = max(estimates.rate(job.spec, Placement(((kind, 1),))).mean, _LEAST)
            left = estimates.remaining(job, at).mean / rate
            self._left[key] = left if isfinite(left) else max(_UNKNOWN_S, self.view.attained_s(job))
        return self._left[key]

    def guests(self, device: DeviceId, jobs: Sequence[Job]) -> list[Guest]:
        """Jobs as they would be on a device, as far as a pattern says: with the batch from which tuning starts."""
        share = min(1.0, self.virtual / max(1, len(jobs)))
        return [
            Guest(job, Setting(job.lane[0] if job.lane else share, self._start(job, device) if self.tuned else 0))
            for job in jobs
        ]

    def _start(self, job: Job, device: DeviceId) -> int:
        bank = self.view.cluster.bank_of(device)
        key = (bank.kind, likeness(job), job.spec.batch_range)
        if key not in self._starts:
            self._starts[key] = best_alone(self.view.estimates, job, bank.kind, bank.memory_bytes)
        return self._starts[key]

    def speeds(self, kind: Kind, guests: Sequence[Guest]) -> list[float]:
        """Progress of each beside the others, relative to alone at its own batch: 1/PD."""
        order = sorted(range(len(guests)), key=lambda place: _like(guests[place]))
        pattern = tuple(_like(guests[place]) for place in order)
        if (kind, pattern) not in self._speeds:
            tenants = [Tenant(guests[place].job.spec) for place in order]
            vector = tuple(guests[place].setting for place in order)
            self._speeds[kind, pattern] = speeds(self.view.estimates, kind, tenants, [vector])[0]
        found = [0.0] * len(guests)
        for place, speed in zip(order, self._speeds[kind, pattern], strict=True):
            found[place] = speed
        return found

    def ends(self, kind: Kind, guests: Sequence[Guest]) -> list[float]:
        """Seconds until each ends if nobody else comes; those that stay go faster as others end."""
        left = [self.left_s(guest.job, kind) for guest in guests]
        ends = [inf] * len(guests)
        there, now = list(range(len(guests))), 0.0
        while there:
            pace = [max(speed, _LEAST) for speed in self.speeds(kind, [guests[place] for place in there])]
            step, first = min((left[place] / speed, place) for place, speed in zip(there, pace, strict=True))
            now += step
            for place, speed in zip(there, pace, strict=True):
                left[place] = max(0.0, left[place] - step * speed)
            ends[first] = now
            there.remove(first)
        return ends

    def cost(self, kind: Kind, guests: Sequence[Guest]) -> float:
        """Weighted sum of the seconds until each ends."""
        ends = self.ends(kind, guests)
        return sum(guest.job.spec.weight * end for guest, end in zip(guests, ends, strict=True))


def _like(guest: Guest) -> tuple[Likeness, Setting]:
    return likeness(guest.job), guest.setting
