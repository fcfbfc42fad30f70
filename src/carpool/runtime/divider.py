"""Updates divided by what was measured: once for each set of devices, and only where it proves worth it; pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from carpool.runtime.dealing import SETTLED, Trait
from carpool.runtime.division import Division, Ranges, UpdateCosts, divide

WORTH = 0.02  # of an update's time must be gained by dividing it
BARRIER_S = 5e-4  # a message to the executor and its answer


class Divider:
    """Remembers what updates take on each kind of device, and what was made of that."""

    def __init__(self, division: Division = Division.CHOSEN) -> None:
        self._division = division
        self._update_s: dict[Trait, deque[float]] = {}
        self._copy_s: dict[Trait, deque[float]] = {}
        self._divided: dict[tuple[Trait, ...], Ranges] = {}
        self._between_s: dict[tuple[tuple[Trait, ...], Ranges], deque[float]] = {}

    def measure(self, trait: Trait, update_s: float, copy_s: float) -> None:
        """Take in seconds per element; 0 for what is not known."""
        if update_s > 0.0 and copy_s > 0.0:
            self._update_s.setdefault(trait, deque(maxlen=SETTLED)).append(update_s)
            self._copy_s.setdefault(trait, deque(maxlen=SETTLED)).append(copy_s)

    def passed(self, traits: Sequence[Trait], ranges: Ranges, between_s: float) -> None:
        """Take in how long a step on such devices, divided so, took beside its longest pass.

        That is what a division is for, whatever was predicted: where it proves worse than none, it is given up.
        """
        key = tuple(traits)
        known = self._between_s.setdefault((key, ranges), deque(maxlen=2 * SETTLED))
        known.append(between_s)
        undivided = self._between_s.get((key, ()))
        if self._division is not Division.CHOSEN or not ranges or undivided is None or len(known) < 2 * SETTLED:
            return
        if statistics.median(list(known)[SETTLED:]) > statistics.median(undivided):  # the first ones touch new memory
            self._divided[key] = ()

    def ranges(self, sizes: tuple[int, ...], traits: Sequence[Trait]) -> Ranges:
        """Who updates what on such devices: all do all until enough is measured, then what is predicted to be best.

        It is decided once, and taken back at most once: changing it costs a new formation.
        """
        key = tuple(traits)
        if key not in self._divided:
            if self._division is Division.CHOSEN and not self._is_measured(traits):
                return ()
            self._divided[key] = self._decided(sizes, key)
        return self._divided[key]

    def _is_measured(self, traits: Sequence[Trait]) -> bool:
        return all(len(self._update_s.get(trait, ())) >= SETTLED for trait in traits)

    def _decided(self, sizes: tuple[int, ...], traits: tuple[Trait, ...]) -> Ranges:
        if self._division is not Division.CHOSEN:
            ones = tuple(1.0 for _ in traits)
            return divide(UpdateCosts(sizes, ones, ones), self._division)
        updates = tuple(statistics.median(self._update_s[trait]) for trait in traits)
        copies = tuple(statistics.median(self._copy_s[trait]) for trait in traits)
        costs = UpdateCosts(sizes, updates, copies, BARRIER_S)
        ranges = divide(costs)
        return ranges if costs.predicted_s(()) > (1.0 + WORTH) * costs.predicted_s(ranges) else ()
