"""When the jobs of a device will end: predicted from which jobs share it, until one after another is done."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import NamedTuple

from carpool.core.model import DeviceId, Job, JobId, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Placement
from carpool.policies.batch_tuning import best_alone
from carpool.policies.goodput import worth_of_step
from carpool.policies.share_search import KnowsMixes, Setting, one_by_one
from carpool.policies.sharing import Likeness, likeness
from carpool.policies.uses import KnowsUse, memory_of

_LEAST = 1e-9
_UNKNOWN_S = 60.0  # left to a job of unknown length that has not run yet; later as much as it has run

Pattern = tuple[tuple[Likeness, Setting], ...]


class Guest(NamedTuple):
    """A job on a device with the setting it has, or would have, there."""

    job: Job
    setting: Setting


class Flow:
    """Answers for one snapshot; what was asked once is not asked again."""

    def __init__(self, view: Snapshot, *, tuned: bool = True, virtual: float = inf) -> None:
        self._view = view
        self._tuned = tuned  # whether batch sizes are
        self._virtual = virtual  # what the equal caps of a device sum to
        self._alone: dict[tuple[JobId, Kind], float] = {}
        self._starts: dict[tuple[Kind, Likeness, object], int] = {}
        self._speeds: dict[tuple[Kind, Pattern], list[float]] = {}
        self._costs: dict[tuple[Kind, tuple[JobId, ...]], float] = {}
        self._uses: dict[tuple[Kind, Likeness], float] = {}

    def left_s(self, job: Job, kind: Kind) -> float:
        """Seconds the job still needs alone on a device of the kind at its own batch."""
        left = self._view.estimates.remaining(job, self._view.at).mean / self._rate(job, kind)
        return left if isfinite(left) else max(_UNKNOWN_S, self._view.attained_s(job))

    def guests(self, device: DeviceId, jobs: Sequence[Job]) -> list[Guest]:
        """Jobs as they would be on a device, as far as a pattern says: with the batch from which tuning starts."""
        share = min(1.0, self._virtual / max(1, len(jobs)))
        return [Guest(job, Setting(job.lane[0] if job.lane else share, self._start(job, device))) for job in jobs]

    def use(self, device: DeviceId, job: Job) -> float:
        """Mean of the shares of SMs and memory that the job takes of a device, as far as they are known."""
        bank, estimates = self._view.cluster.bank_of(device), self._view.estimates
        key = (bank.kind, likeness(job))
        if key not in self._uses:
            uses = [estimates.use(job.spec, bank.kind).sm] if isinstance(estimates, KnowsUse) else []
            if bank.memory_bytes:
                uses.append(memory_of(estimates, job.spec) / bank.memory_bytes)
            self._uses[key] = sum(uses) / max(1, len(uses))
        return self._uses[key]

    def speeds(self, kind: Kind, guests: Sequence[Guest]) -> list[float]:
        """Progress of each beside the others, relative to alone at its own batch: 1/PD."""
        order = sorted(range(len(guests)), key=lambda place: _like(guests[place]))
        pattern = tuple([_like(guests[place]) for place in order])
        known = self._speeds.get((kind, pattern))
        if known is None:
            known = self._speeds[kind, pattern] = self._predicted(kind, [guests[place] for place in order])
        found = [0.0] * len(guests)
        for place, speed in zip(order, known, strict=True):
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
        key = (kind, tuple([guest.job.id for guest in guests]))
        if key not in self._costs:
            ends = self.ends(kind, guests)
            self._costs[key] = sum([g.job.spec.weight * end for g, end in zip(guests, ends, strict=True)])
        return self._costs[key]

    def _rate(self, job: Job, kind: Kind) -> float:
        key = (job.id, kind)
        if key not in self._alone:
            self._alone[key] = max(self._view.estimates.rate(job.spec, Placement(((kind, 1),))).mean, _LEAST)
        return self._alone[key]

    def _start(self, job: Job, device: DeviceId) -> int:
        if not self._tuned or job.spec.batch_range is None:
            return 0
        bank = self._view.cluster.bank_of(device)
        key = (bank.kind, likeness(job), job.spec.batch_range)
        if key not in self._starts:
            self._starts[key] = best_alone(self._view.estimates, job, bank.kind, bank.memory_bytes)
        return self._starts[key]

    def _predicted(self, kind: Kind, guests: Sequence[Guest]) -> list[float]:
        estimates = self._view.estimates
        mix = [(guest.job.spec, *guest.setting) for guest in guests]
        if isinstance(estimates, KnowsMixes):
            rates = estimates.mixed(kind, [mix])[0]
        else:
            rates = one_by_one(estimates, kind, mix)
        return [
            rate.mean * worth_of_step(estimates, spec, batch_size) / self._rate(guest.job, kind)
            for rate, guest, (spec, _, batch_size) in zip(rates, guests, mix, strict=True)
        ]


def _like(guest: Guest) -> tuple[Likeness, Setting]:
    return likeness(guest.job), guest.setting
