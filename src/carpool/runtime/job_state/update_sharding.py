"""Update sharding: chooses which rank updates which parameters, by predicted and measured time; pure.

Every rank has the whole sum of a step's gradients. Either each updates all parameters itself, which takes no exchange
but waits for the slowest rank, or each updates a stretch of them and hands the new values to the others:

    all do all          max_r  u_r · P
    a stretch n_r each  max_r  n_r · (u_r + c_r)  +  max_r  (P − n_r) · c_r  +  b

P elements, u_r seconds per element to update, c_r seconds per element to copy what is exchanged (the weight and what
the optimizer remembers of it) to or from shared memory, b seconds for one more barrier. Stretches are whole parameters
(see update.py), so that the bits are the same whichever is chosen.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from carpool.runtime.job_state.proportional_split import SETTLED, DeviceShare

Ranges = tuple[tuple[int, int], ...]  # parameters [first, stop) of every rank; empty: all do all


class UpdateSharding(StrEnum):
    """Who updates the parameters."""

    CHOSEN = "chosen"  # by prediction
    ALL = "all"  # every rank updates all of them
    FIRST = "first"  # rank 0 does, for everybody
    EVEN = "even"  # as many elements for each as whole parameters allow


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """What an update was measured to take."""

    sizes: tuple[int, ...]  # elements of each parameter
    update_s: tuple[float, ...]  # per element, by rank
    copy_s: tuple[float, ...]  # per element, by rank
    barrier_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.update_s)

    def predicted_s(self, ranges: Ranges) -> float:
        """How long an update would take, divided like this."""
        total = sum(self.sizes)
        if not ranges:
            return max(self.update_s) * total
        owned = [sum(self.sizes[first:stop]) for first, stop in ranges]
        rows = list(zip(owned, self.update_s, self.copy_s, strict=True))
        slowest = max(own * (update + copy) for own, update, copy in rows)
        return slowest + max((total - own) * copy for own, _, copy in rows) + self.barrier_s


def divide(costs: UpdateCosts, division: UpdateSharding = UpdateSharding.CHOSEN) -> Ranges:
    """Who updates what; where several ways are predicted to be equally quick, the one without exchange."""
    if division is UpdateSharding.ALL:
        return ()
    if division is UpdateSharding.FIRST:
        return all_on_first(costs)
    if division is UpdateSharding.EVEN:
        return proportional_ranges(costs.sizes, [1.0] * costs.num_ranks)
    speeds = [1.0 / max(update + copy, 1e-15) for update, copy in zip(costs.update_s, costs.copy_s, strict=True)]
    ways = [
        (),
        all_on_first(costs),
        proportional_ranges(costs.sizes, [1.0] * costs.num_ranks),
        proportional_ranges(costs.sizes, speeds),
        refined(costs, proportional_ranges(costs.sizes, speeds)),
    ]
    return min(ways, key=costs.predicted_s)  # the first of equals


def all_on_first(costs: UpdateCosts) -> Ranges:
    """Everything for rank 0."""
    count = len(costs.sizes)
    return ((0, count), *[(count, count)] * (costs.num_ranks - 1))


def proportional_ranges(sizes: Sequence[int], speeds: Sequence[float]) -> Ranges:
    """A stretch of parameters for each, in proportion to speed as far as whole parameters allow."""
    ends = list(itertools.accumulate(sizes, initial=0))
    cuts = [0]
    for goal in list(itertools.accumulate(speeds))[:-1]:
        wanted = ends[-1] * goal / sum(speeds)
        nearest = min(range(len(ends)), key=lambda cut: (abs(ends[cut] - wanted), cut))
        cuts.append(max(cuts[-1], nearest))
    return tuple(itertools.pairwise([*cuts, len(sizes)]))


def refined(costs: UpdateCosts, ranges: Ranges) -> Ranges:
    """The same with every cut moved by a parameter as long as that helps."""
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


WORTH = 0.02  # of an update's time must be gained by dividing it
BARRIER_S = 5e-4  # a message to the executor and its answer


class UpdateShardingPlanner:
    """Remembers what updates take on each kind of device, and what was made of that."""

    def __init__(self, division: UpdateSharding = UpdateSharding.CHOSEN) -> None:
        self._division = division
        self._update_s: dict[DeviceShare, deque[float]] = {}
        self._copy_s: dict[DeviceShare, deque[float]] = {}
        self._divided: dict[tuple[DeviceShare, ...], Ranges] = {}
        self._between_s: dict[tuple[tuple[DeviceShare, ...], Ranges], deque[float]] = {}

    def measure(self, trait: DeviceShare, update_s: float, copy_s: float) -> None:
        """Take in seconds per element; 0 for what is not known."""
        if update_s > 0.0 and copy_s > 0.0:
            self._update_s.setdefault(trait, deque(maxlen=SETTLED)).append(update_s)
            self._copy_s.setdefault(trait, deque(maxlen=SETTLED)).append(copy_s)

    def passed(self, traits: Sequence[DeviceShare], ranges: Ranges, between_s: float) -> None:
        """Take in how long a step on such devices, divided so, took beside its longest pass.

        That is what a division is for, whatever was predicted: where it proves worse than none, it is given up.
        """
        key = tuple(traits)
        known = self._between_s.setdefault((key, ranges), deque(maxlen=2 * SETTLED))
        known.append(between_s)
        undivided = self._between_s.get((key, ()))
        if self._division is not UpdateSharding.CHOSEN or not ranges or undivided is None or len(known) < 2 * SETTLED:
            return
        if statistics.median(list(known)[SETTLED:]) > statistics.median(undivided):  # the first ones touch new memory
            self._divided[key] = ()

    def ranges(self, sizes: tuple[int, ...], traits: Sequence[DeviceShare]) -> Ranges:
        """Who updates what on such devices: all do all until enough is measured, then what is predicted to be best.

        It is decided once, and taken back at most once: changing it costs a new formation.
        """
        key = tuple(traits)
        if key not in self._divided:
            if self._division is UpdateSharding.CHOSEN and not self._is_measured(traits):
                return ()
            self._divided[key] = self._decided(sizes, key)
        return self._divided[key]

    def _is_measured(self, traits: Sequence[DeviceShare]) -> bool:
        return all(len(self._update_s.get(trait, ())) >= SETTLED for trait in traits)

    def _decided(self, sizes: tuple[int, ...], traits: tuple[DeviceShare, ...]) -> Ranges:
        if self._division is not UpdateSharding.CHOSEN:
            ones = tuple(1.0 for _ in traits)
            return divide(UpdateCosts(sizes, ones, ones), self._division)
        updates = tuple(statistics.median(self._update_s[trait]) for trait in traits)
        copies = tuple(statistics.median(self._copy_s[trait]) for trait in traits)
        costs = UpdateCosts(sizes, updates, copies, BARRIER_S)
        ranges = divide(costs)
        return ranges if costs.predicted_s(()) > (1.0 + WORTH) * costs.predicted_s(ranges) else ()
