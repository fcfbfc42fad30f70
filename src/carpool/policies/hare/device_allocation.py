"""Device counts per job: the first jobs get theirs whole, others share what is left, and the rest run in idle gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from carpool.core.model import Job, JobId, Kind
from carpool.core.policy import Snapshot
from carpool.core.topology import Neighbour, Placement
from carpool.policies.estimator_queries import rate_on

Counts = tuple[tuple[Kind, int], ...]  # devices of each kind, one entry for each

STAY = 1.02  # bonus on the current devices, so that ties move no job
# a device may cost this much more than its value to a job, relative to the price, before the job prefers to wait
_LOSS = 0.05
_GAIN = 1.1  # factor by which devices of other types must speed a job up to be added
_LEAST_IDLE = 0.1  # portion of a step below which a gap is not worth a switch


class Bid(NamedTuple):
    """One job's values and limits."""

    job: Job
    worth: float  # of a unit of its work
    speeds: Mapping[Kind, float]  # units of work per device-second at full width, where it can run
    widths: Mapping[Kind, int]  # most devices of each kind
    stay: float = STAY  # factor on the value of the devices that it holds


class GapFill(NamedTuple):
    """A job that runs in the gaps of another."""

    leader: JobId
    kind: Kind
    num_devices: int
    idle: float


@dataclass(slots=True)
class DeviceCounts:
    """The result: device counts by job, and gap fills."""

    first: dict[JobId, Counts] = field(default_factory=dict)  # served first
    held: dict[JobId, Counts] = field(default_factory=dict)  # full size on the most profitable type
    filled: dict[JobId, Counts] = field(default_factory=dict)  # from the remaining devices
    fillings: dict[JobId, GapFill] = field(default_factory=dict)

    def counts(self, job: JobId) -> Counts | None:
        return self.first.get(job) or self.held.get(job) or self.filled.get(job)


class DeviceAllocator:
    """Assigns all devices by count, for one plan."""

    def __init__(
        self, view: Snapshot, capacity: Mapping[Kind, int], prices: Mapping[Kind, float], slower: float
    ) -> None:
        self._view = view
        self._left = dict(capacity)
        self._prices = prices
        self._slower = slower
        self._held = {job.id: held_counts(view, job) for job in view.running()}
        self.dealt = DeviceCounts()

    def best_gain(self, bid: Bid) -> float:
        """The most a job gains per device-second beyond the price, over all types."""
        return max([self._gain(bid, kind) for kind in bid.speeds])

    def first(self, bid: Bid) -> None:
        """Give a job the fastest devices, whatever their price."""
        self._quickest(self.dealt.first, bid, self._choices(bid, inf))

    def hold(self, bid: Bid) -> None:
        """Give a job its full size on its most profitable type, if that is free.

        A job for which no type has enough devices takes at once what pays for itself.
        """
        kind = max(bid.speeds, key=lambda kind: self._gain(bid, kind))
        if bid.widths[kind] < bid.job.spec.widest:
            self.pay(bid)
        elif self._left[kind] >= bid.widths[kind]:
            self._give(self.dealt.held, bid, ((kind, bid.widths[kind]),))

    def pay(self, bid: Bid) -> None:
        """Give a job devices whose value about covers their price, perhaps fewer or of several types."""
        choices = [(bid.worth * rate, self._cost(counts), counts) for rate, counts in self._choices(bid, self._slower)]
        paying = [(value - cost, counts) for value, cost, counts in choices if value >= (1.0 - _LOSS) * cost]
        if paying:
            self._give(self.dealt.filled, bid, max(paying, key=lambda choice: choice[0])[1])

    def fill(self, bid: Bid) -> None:
        """Give a job the devices that speed it up most, except far slower ones."""
        self._quickest(self.dealt.filled, bid, self._choices(bid, self._slower))

    def fill_gaps(self, bid: Bid, leaders: Sequence[tuple[Job, Counts]]) -> None:
        estimates, spec = self._view.estimates, bid.job.spec
        if spec.exact or bid.job.lane:
            return
        taken = {filling.leader for filling in self.dealt.fillings.values()}
        for leader, counts in leaders:
            if leader.id in taken:
                continue
            idle = estimates.idle(leader.spec, counts)
            for kind, number in counts:
                count = min(number, bid.widths.get(kind, 0))
                if idle.get(kind, 0.0) < _LEAST_IDLE or count < spec.narrowest:
                    continue
                beside = Neighbour(leader.spec, groups=counts)
                placement = Placement(((kind, count),), neighbours=(beside,), turn=1)
                if estimates.rate(spec, placement).mean > 0.0:
                    self.dealt.fillings[bid.job.id] = GapFill(leader.id, kind, count, idle[kind])
                    return

    def _gain(self, bid: Bid, kind: Kind) -> float:
        """Gain per device-second of a type beyond its price."""
        stays = any(held == kind for held, _ in self._held.get(bid.job.id, ()))
        return bid.worth * bid.speeds[kind] * (bid.stay if stays else 1.0) - self._prices[kind]

    def _choices(self, bid: Bid, slower: float) -> list[tuple[float, Counts]]:
        """(rate, devices) from the remaining devices: of each type, halved until they fit; and of several types."""
        spec, fastest = bid.job.spec, max(bid.speeds.values())
        choices: list[tuple[float, Counts]] = []
        fair = [kind for kind, speed in bid.speeds.items() if speed * slower >= fastest and self._left[kind]]
        for kind in fair:
            count = bid.widths[kind]
            while count > self._left[kind]:
                count //= 2
            if count >= spec.narrowest:
                full = count == bid.widths[kind]
                rate = bid.speeds[kind] * count if full else rate_on(self._view, spec, kind, count)
                stays = ((kind, count),) == self._held.get(bid.job.id)
                choices.append((rate * (bid.stay if stays else 1.0), ((kind, count),)))
        if len(fair) > 1 and not spec.exact:
            best = max([rate for rate, _ in choices], default=0.0)
            choices += self._mixed(bid, fair, best * _GAIN)
        return choices

    def _mixed(self, bid: Bid, kinds: list[Kind], least: float) -> list[tuple[float, Counts]]:
        spec, width = bid.job.spec, bid.job.spec.widest
        counts: list[tuple[Kind, int]] = []
        for kind in sorted(kinds, key=lambda kind: -bid.speeds[kind]):
            if width:
                counts.append((kind, min(self._left[kind], width)))
                width -= counts[-1][1]
        fluid = sum([bid.speeds[kind] * count for kind, count in counts])
        if len(counts) < 2 or spec.widest - width < spec.narrowest or fluid <= least:
            return []
        mixed = tuple(sorted(counts))
        rate = self._view.estimates.rate(spec, Placement(mixed)).mean
        return [(rate, mixed)] if rate > least else []

    def _cost(self, counts: Counts) -> float:
        return sum([self._prices[kind] * count for kind, count in counts])

    def _quickest(self, to: dict[JobId, Counts], bid: Bid, choices: list[tuple[float, Counts]]) -> None:
        if choices:
            self._give(to, bid, max(choices, key=lambda choice: choice[0])[1])

    def _give(self, to: dict[JobId, Counts], bid: Bid, counts: Counts) -> None:
        to[bid.job.id] = counts
        for kind, count in counts:
            self._left[kind] -= count


def held_counts(view: Snapshot, job: Job) -> Counts:
    """Devices of each type a job holds; none for one that runs in gaps."""
    if job.desired is None or job.desired.shares[0].turn:
        return ()
    counts: dict[Kind, int] = {}
    for kind, count in view.cluster.groups_of(job.desired):
        counts[kind] = counts.get(kind, 0) + count
    return tuple(sorted(counts.items()))
