"""Figures that only some keys have, such as a training's own slowness on a kind of device, looked up for many keys."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=tuple[int, float])


class Keyed(Generic[Key]):
    """Which key has which place in a row of figures: the same for all rows that a fit tries."""

    __slots__ = ("places", "sizes")

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.sizes: dict[int, list[float]] = {}  # by training, in order
        for training, size in sorted(self.places):
            self.sizes.setdefault(training, []).append(size)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class OwnFigures(Generic[Key]):
    """One figure for each key, in the order of the keys."""

    keyed: Keyed[Key]
    row: NDArray[np.float64]

    @classmethod
    def none(cls) -> OwnFigures[Key]:
        """Of no key."""
        return cls(Keyed(), np.empty(0))


class Lookup(Generic[Key]):
    """Figures of certain keys: 0 where one has none.

    `between`: a key whose training has figures on both sides of it gets what is between the nearest of them, in the
    logarithm of the size. Where figures stand is found once for all rows with the same keys.
    """

    def __init__(self, keys: Sequence[Key], *, between: bool = False) -> None:
        self.unlike = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self._of = np.array([self.unlike[key] for key in keys], np.intp)
        self._between = between
        self._found: tuple[Keyed[Key], _Stand] | None = None

    def __call__(self, figures: OwnFigures[Key]) -> NDArray[np.float64]:
        """One for each key."""
        if self._found is None or self._found[0] is not figures.keyed:
            self._found = figures.keyed, self._stand(figures.keyed)
        stand = self._found[1]
        row = np.append(figures.row, 0.0)  # the last is that of keys that have none
        found = row[stand.low]
        apart = stand.apart
        found[apart] += (row[stand.high] - found[apart]) / stand.span * stand.past
        return np.asarray(found[self._of])

    def _stand(self, keyed: Keyed[Key]) -> _Stand:
        low = np.full(len(self.unlike), len(keyed), np.intp)
        apart: list[tuple[int, int]] = []  # key, and where the next larger size stands
        logs: list[tuple[float, float, float]] = []  # of the smaller size, of the key's own, of the larger
        for place, key in enumerate(self.unlike):
            known = keyed.places.get(key)
            if known is not None:
                low[place] = known
            elif self._between and (beside := _beside(keyed.sizes.get(key[0], ()), key[1])):
                low[place], high = (keyed.places[key[0], size] for size in beside)  # type: ignore[index]
                apart.append((place, high))
                logs.append((np.log(beside[0]), np.log(key[1]), np.log(beside[1])))
        places = np.array(apart, np.intp).reshape(-1, 2)
        smaller, own, larger = np.array(logs, np.float64).reshape(-1, 3).T
        return _Stand(low, places[:, 0], places[:, 1], larger - smaller, own - smaller)


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where the figures of keys stand, and how far those in between are from the smaller size."""

    low: NDArray[np.intp]  # [key] its own figure, or that of the next smaller size
    apart: NDArray[np.intp]  # the keys between two sizes
    high: NDArray[np.intp]  # of each of those the figure of the next larger size
    span: NDArray[np.float64]
    past: NDArray[np.float64]


def _beside(sizes: Sequence[float], size: float) -> tuple[float, float] | None:
    """The nearest sizes on both sides, where there are some."""
    if not sizes or not sizes[0] < size < sizes[-1]:
        return None
    place = bisect_left(sizes, size)
    return sizes[place - 1], sizes[place]
