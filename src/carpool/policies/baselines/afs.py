"""AFS: elastic shares; the next device goes where it reduces the sum of completion times most."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from carpool.core.draft import Draft
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.elastic_allocation import Floats, elastic_counts, resize
from carpool.policies.estimator_queries import by_rate, devices_in_use_or_free, kind_held, placed_on, seconds_left
from carpool.policies.registry import register


@register("afs")
@dataclass(frozen=True, slots=True)
class Afs(Policy):
    """Reassign all devices one by one at every arrival and completion.

    Of two jobs let a be the one that would end first at its current share, p the rate now and p' with one more
    device. The device goes to b iff (p_b' - p_b) / p_b' > (p_a' - p_a) / p_a; of two jobs without devices, to the
    one with less remaining time; each side is multiplied by the job's weight. The test is not transitive, so jobs
    are compared in a knock-out in order of submission. Hwang et al., "Elastic Resource Sharing for Distributed Deep
    Learning", NSDI 2021.

    `optimism` looks further ahead: to b iff (p_a' - p_a) / p_a < (p_b' - p_b) / (2 R - p_b'), R being b's rate with
    that share of a's devices, which b inherits when a ends (0: AFS; 1: exact for two jobs). `ahead` counts all
    inheritance between jobs (`elastic_allocation`): optimal for a batch, one device type only.
    """

    optimism: float = 0.0
    ahead: bool = False

    def plan(self, view: Snapshot) -> Plan:
        stakes = [_Stake(view, place, job) for place, job in enumerate(sorted(view.active(), key=lambda job: job.seq))]
        left = devices_in_use_or_free(view)
        if self.ahead and len(left) == 1:
            _look_ahead(stakes, left)
        self._deal(stakes, left)
        draft = Draft(view)
        for stake in stakes:
            if not stake.count:
                draft.release(stake.job)
        shrinking_first = sorted([stake for stake in stakes if stake.count], key=lambda stake: stake.count - stake.held)
        late = [stake for stake in shrinking_first if not resize(draft, stake.job, stake.kind, stake.count)]
        for stake in late:  # jobs that exchange device types
            if resize(draft, stake.job, stake.kind, stake.count):
                continue
            draft.release(stake.job)
        plan = draft.finish(f"{len(shrinking_first)} of {len(stakes)} jobs hold devices, by completion time")
        return plan if plan.changes else Plan.NOTHING

    def _deal(self, stakes: list[_Stake], left: dict[Kind, int]) -> None:
        size = 1 << max(0, len(stakes) - 1).bit_length()
        tree: list[_Stake | None] = [None] * (2 * size)
        tree[size : size + len(stakes)] = [stake if stake.next_rate > 0.0 else None for stake in stakes]
        for place in range(size - 1, 0, -1):
            tree[place] = self._better(tree[2 * place], tree[2 * place + 1])
        while (winner := tree[1]) is not None:
            place = size + winner.place
            if not winner.grow(left):
                tree[place] = None
            while place > 1:
                place //= 2
                tree[place] = self._better(tree[2 * place], tree[2 * place + 1])

    def _better(self, first: _Stake | None, second: _Stake | None) -> _Stake | None:
        if first is None or second is None:
            return first or second
        if not first.count and not second.count:
            return first if first.priority <= second.priority else second
        a, b = (first, second) if (first.seconds, -first.rate) <= (second.seconds, -second.rate) else (second, first)
        to_a = a.weight * (a.next_rate - a.rate) / a.rate
        ahead = b.rate_of(b.next_count + self.optimism * a.count) if self.optimism else b.next_rate
        to_b = b.weight * (b.next_rate - b.rate) / (2.0 * ahead - b.next_rate)
        return b if to_b > to_a else a


class _Stake:
    """A job's device count so far, and the gain of one more."""

    __slots__ = (
        "_kinds",
        "_rates",
        "_view",
        "count",
        "held",
        "job",
        "kind",
        "next_count",
        "next_rate",
        "place",
        "priority",
        "rate",
        "remaining",
        "seconds",
        "weight",
    )

    def __init__(self, view: Snapshot, place: int, job: Job) -> None:
        self.place = place
        self.job = job
        self.weight = job.spec.weight
        self.held = 0 if job.desired is None else job.desired.num_devices
        self.count = 0
        self.rate = 0.0
        self.seconds = inf  # until its end, with the current count
        self.next_count = job.spec.narrowest
        self._view = view
        self._rates: dict[int, float] = {}
        self.remaining = view.estimates.remaining(job, view.at).mean
        held = kind_held(view, job)
        speeds = by_rate(view, job.spec, self.next_count)
        self._kinds = [kind for rate, kind in sorted(speeds, key=lambda speed: (-speed[0], speed[1] != held))]
        self.next_rate = speeds[0][0] if speeds else 0.0
        self.priority = seconds_left(view, job, self.next_rate) / self.weight
        if self._kinds:
            self.kind = self._kinds[0]

    def grow(self, left: dict[Kind, int]) -> bool:
        lacking = self.next_count - self.count
        options = [self.kind] if self.count else self._kinds
        kind = next((kind for kind in options if left[kind] >= lacking), None)
        if kind is None or self.next_count > self.job.spec.widest:
            return False
        if not self.count and kind != self.kind:
            self.kind = kind
            self.next_rate = self.rate_of(self.next_count)
        if self.next_rate <= self.rate:
            return False
        self.take(self.next_count, left)
        return True

    def take(self, count: int, left: dict[Kind, int]) -> None:
        left[self.kind] -= count - self.count
        self.count, self.rate = count, self.rate_of(count)
        self.seconds = self.remaining / self.rate
        self.next_count = count + 1
        self.next_rate = self.rate_of(self.next_count)

    def speeds(self, num_devices: int) -> Floats:
        """Its rate on 0, 1, … devices; 0 below its minimum, constant above its maximum."""
        return np.array([self.rate_of(k) if k >= self.job.spec.narrowest else 0.0 for k in range(num_devices + 1)])

    def rate_of(self, count: float) -> float:
        """Rate on a number of devices of its type, interpolated, constant above its maximum."""
        most = min(self.job.spec.widest, self._view.cluster.capacity[self.kind])
        low = min(int(count), most)
        part = count - low if low < most else 0.0
        return self._rate(low) if not part else (1.0 - part) * self._rate(low) + part * self._rate(low + 1)

    def _rate(self, count: int) -> float:
        if count not in self._rates:
            placement = placed_on(self._view.cluster, self.kind, count)
            self._rates[count] = self._view.estimates.rate(self.job.spec, placement).mean
        return self._rates[count]


def _look_ahead(stakes: list[_Stake], left: dict[Kind, int]) -> None:
    """Device counts of one type by `elastic_counts`; counts that a job does not accept are not assigned."""
    (num_devices,) = left.values()
    able = [stake for stake in stakes if stake.next_rate > 0.0 and stake.job.spec.narrowest <= num_devices]
    if not able:
        return
    tables = {stake.job.id: stake.speeds(num_devices) for stake in able}
    able.sort(key=lambda stake: (-stake.remaining / tables[stake.job.id].max(), stake.job.seq))
    counts = elastic_counts([tables[stake.job.id] for stake in able], [stake.weight for stake in able], num_devices)
    for stake, count in zip(able, counts, strict=True):
        if count >= stake.job.spec.narrowest:
            stake.take(min(count, stake.job.spec.widest), left)
