"""Update sharding: chooses which rank updates which parameters, by predicted and measured time; pure.

Every rank has the whole sum of a step's gradients. Either each updates all parameters, which needs no exchange but
waits for the slowest rank, or each updates a range of them and shares the new values:

    all update all        max_r  u_r · P
    a range of n_r each   max_r  n_r · (u_r + c_r)  +  max_r  (P − n_r) · c_r  +  b

P elements, u_r seconds per element to update, c_r seconds per element to copy a weight and its optimizer state to or
from shared memory, b seconds for one more barrier. Ranges are whole parameters, so that the bits are the same either
way.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from carpool.runtime.job_state.proportional_split import MIN_PASSES, DeviceShare

Ranges = tuple[tuple[int, int], ...]  # parameters [first, stop) of every rank; empty: all update all

MIN_GAIN = 0.02  # of an update's time, for sharding it
BARRIER_S = 5e-4  # a message to the executor and its answer


class UpdateSharding(StrEnum):
    """Which rank updates the parameters."""

    CHOSEN = "chosen"  # by prediction
    ALL = "all"  # every rank updates all of them
    FIRST = "first"  # rank 0 updates all of them
    EVEN = "even"  # ranges as equal as whole parameters allow


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """Measured times of an update."""

    sizes: tuple[int, ...]  # elements of each parameter
    update_s: tuple[float, ...]  # per element, by rank
    copy_s: tuple[float, ...]  # per element, by rank
    barrier_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        return len(self.update_s)

    def predicted_s(self, ranges: Ranges) -> float:
        total = sum(self.sizes)
        if not ranges:
            return max(self.update_s) * total
        owned = [sum(self.sizes[first:stop]) for first, stop in ranges]
        rows = list(zip(owned, self.update_s, self.copy_s, strict=True))
        slowest = max(own * (update + copy) for own, update, copy in rows)
        return slowest + max((total - own) * copy for own, _, copy in rows) + self.barrier_s


def choose_ranges(costs: UpdateCosts, sharding: UpdateSharding = UpdateSharding.CHOSEN) -> Ranges:
    """The ranges with the shortest predicted update; of equal ones, that without exchange."""
    if sharding is UpdateSharding.ALL:
        return ()
    if sharding is UpdateSharding.FIRST:
        return all_on_first(costs)
    if sharding is UpdateSharding.EVEN:
        return proportional_ranges(costs.sizes, [1.0] * costs.num_ranks)
    speeds = [1.0 / max(update + copy, 1e-15) for update, copy in zip(costs.update_s, costs.copy_s, strict=True)]
    candidates = [
        (),
        all_on_first(costs),
        proportional_ranges(costs.sizes, [1.0] * costs.num_ranks),
        proportional_ranges(costs.sizes, speeds),
        refined(costs, proportional_ranges(costs.sizes, speeds)),
    ]
    return min(candidates, key=costs.predicted_s)  # the first of equals


def all_on_first(costs: UpdateCosts) -> Ranges:
    """All parameters on rank 0."""
    count = len(costs.sizes)
    return ((0, count), *[(count, count)] * (costs.num_ranks - 1))


def proportional_ranges(sizes: Sequence[int], speeds: Sequence[float]) -> Ranges:
    """A range of parameters per rank, as proportional to speed as whole parameters allow."""
    ends = list(itertools.accumulate(sizes, initial=0))
    cuts = [0]
    for goal in list(itertools.accumulate(speeds))[:-1]:
        wanted = ends[-1] * goal / sum(speeds)
        nearest = min(range(len(ends)), key=lambda cut: (abs(ends[cut] - wanted), cut))
        cuts.append(max(cuts[-1], nearest))
    return tuple(itertools.pairwise([*cuts, len(sizes)]))


def refined(costs: UpdateCosts, ranges: Ranges) -> Ranges:
    """The ranges after moving single boundaries by one parameter as long as that helps."""
    best, least_s = ranges, costs.predicted_s(ranges)
    while True:
        cuts = [stop for _, stop in best[:-1]]
        moved = []
        for place, by in itertools.product(range(len(cuts)), (-1, 1)):
            tried = [0, *cuts[:place], cuts[place] + by, *cuts[place + 1 :], len(costs.sizes)]
            if tried == sorted(tried):
                moved.append(tuple(itertools.pairwise(tried)))
        better = min(moved, key=costs.predicted_s, default=best)
        if costs.predicted_s(better) >= least_s:
            return best
        best, least_s = better, costs.predicted_s(better)


class UpdateShardingPlanner:
    """Remembers update times per device share and the ranges chosen from them."""

    def __init__(self, sharding: UpdateSharding = UpdateSharding.CHOSEN) -> None:
        self._sharding = sharding
        self._update_s: dict[DeviceShare, deque[float]] = {}
        self._copy_s: dict[DeviceShare, deque[float]] = {}
        self._chosen: dict[tuple[DeviceShare, ...], Ranges] = {}
        self._sync_s: dict[tuple[tuple[DeviceShare, ...], Ranges], deque[float]] = {}

    def measure(self, share: DeviceShare, update_s: float, copy_s: float) -> None:
        """Record seconds per element; 0 means unknown."""
        if update_s > 0.0 and copy_s > 0.0:
            self._update_s.setdefault(share, deque(maxlen=MIN_PASSES)).append(update_s)
            self._copy_s.setdefault(share, deque(maxlen=MIN_PASSES)).append(copy_s)

    def on_step(self, shares: Sequence[DeviceShare], ranges: Ranges, sync_s: float) -> None:
        """Record the time of a step outside its longest pass; sharding that proves slower than none is given up."""
        key = tuple(shares)
        known = self._sync_s.setdefault((key, ranges), deque(maxlen=2 * MIN_PASSES))
        known.append(sync_s)
        unsharded = self._sync_s.get((key, ()))
        if (
            self._sharding is not UpdateSharding.CHOSEN
            or not ranges
            or unsharded is None
            or len(known) < 2 * MIN_PASSES
        ):
            return
        if statistics.median(list(known)[MIN_PASSES:]) > statistics.median(
            unsharded
        ):  # the first updates touch new memory
            self._chosen[key] = ()

    def ranges(self, sizes: tuple[int, ...], shares: Sequence[DeviceShare]) -> Ranges:
        """The ranges for these devices: none until enough is measured, then the best predicted ones.

        Decided once and taken back at most once, because a change costs a new epoch.
        """
        key = tuple(shares)
        if key not in self._chosen:
            is_measured = all(len(self._update_s.get(share, ())) >= MIN_PASSES for share in shares)
            if self._sharding is UpdateSharding.CHOSEN and not is_measured:
                return ()
            self._chosen[key] = self._choose(sizes, key)
        return self._chosen[key]

    def _choose(self, sizes: tuple[int, ...], shares: tuple[DeviceShare, ...]) -> Ranges:
        if self._sharding is not UpdateSharding.CHOSEN:
            ones = tuple(1.0 for _ in shares)
            return choose_ranges(UpdateCosts(sizes, ones, ones), self._sharding)
        updates = tuple(statistics.median(self._update_s[share]) for share in shares)
        copies = tuple(statistics.median(self._copy_s[share]) for share in shares)
        costs = UpdateCosts(sizes, updates, copies, BARRIER_S)
        ranges = choose_ranges(costs)
        return ranges if costs.predicted_s(()) > (1.0 + MIN_GAIN) * costs.predicted_s(ranges) else ()
