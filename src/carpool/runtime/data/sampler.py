"""Sampler: the samples of each step as a function of seed, epoch and position, independent of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError
from carpool.runtime.engine.determinism import derive, permutation

Shuffle = Callable[[int, int], Sequence[int]]  # (seed, epoch) -> the sample indices of that epoch


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next step starts: steps done, epochs done, samples used of the current epoch."""

    step: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The samples of one step, and where the next one starts."""

    at: Cursor
    samples: NDArray[np.int64]
    after: Cursor

    @property
    def ends_epoch(self) -> bool:
        return self.after.epoch > self.at.epoch


class StepSampler:
    """Draws samples: shuffled every epoch, in dataset order, or in the order of a function ``(seed, epoch)``."""

    def __init__(self, size: int, seed: int, shuffle: bool | Shuffle = True) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}  # of two epochs, because prefetching reads ahead

    def samples(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            for old in list(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = self._order(epoch)
        return self._orders[epoch]

    def draw(self, cursor: Cursor, batch_size: int) -> Draw:
        """The next ``batch_size`` samples, or the rest of the epoch."""
        end = min(cursor.offset + batch_size, self.size)
        samples = self.samples(cursor.epoch)[cursor.offset : end]
        if end == self.size:
            after = Cursor(cursor.step + 1, cursor.epoch + 1, 0)
        else:
            after = Cursor(cursor.step + 1, cursor.epoch, end)
        return Draw(cursor, samples, after)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.shuffle is True:
            return permutation(self.size, derive("order", self.seed, epoch))
        if self.shuffle is False:
            return np.arange(self.size, dtype=np.int64)
        samples = np.asarray(self.shuffle(self.seed, epoch), dtype=np.int64)
        if samples.shape != (self.size,):
            raise InputError(
                f"shuffle(seed, epoch) returned shape {samples.shape} for epoch {epoch}; it must be ({self.size},)",
                way_out=f"Return {self.size} sample indices (they may repeat).",
            )
        wrong = samples[(samples < 0) | (samples >= self.size)]
        if wrong.size:
            raise InputError(
                f"shuffle(seed, epoch) returned sample {wrong[0]} for epoch {epoch}; samples are 0 to {self.size - 1}"
            )
        return samples


def batch_lengths(size: int, batch_size: int, offset: int = 0) -> tuple[int, ...]:
    """The different batch sizes of the steps from an offset on: full batches and last partial ones."""
    lengths = set()
    for left in (size - offset, size):
        if left >= batch_size:
            lengths.add(batch_size)
        if left % batch_size:
            lengths.add(left % batch_size)
    return tuple(sorted(lengths))
