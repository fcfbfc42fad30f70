"""Sampler: the samples of each step as a function of seed, epoch and position, independent of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carpool.core.errors import InputError
from carpool.runtime.engine.determinism import derive, permutation

Shuffle = Callable[[int, int], Sequence[int]]  # (seed, epoch) -> the samples of that epoch, in order


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next step begins: steps done, epochs done, samples of the running epoch already used."""

    step: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The samples of one step, and where the step after it begins."""

    at: Cursor
    samples: NDArray[np.int64]
    after: Cursor

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch."""
        return self.after.epoch > self.at.epoch


class StepSampler:
    """The order of the samples: shuffled anew each epoch, as they lie, or as a function ``(seed, epoch)`` says."""

    def __init__(self, size: int, seed: int, shuffle: bool | Shuffle = True) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._known: dict[int, NDArray[np.int64]] = {}

    def samples(self, epoch: int) -> NDArray[np.int64]:
        """All samples of an epoch, in order (two epochs are kept: somebody may look ahead)."""
        if epoch not in self._known:
            for old in list(self._known)[:-1]:
                del self._known[old]
            self._known[epoch] = self._arrange(epoch)
        return self._known[epoch]

    def draw(self, cursor: Cursor, batch_size: int) -> Draw:
        """What the step at the cursor holds: the next ``batch_size`` samples, or the few that are left of the epoch."""
        end = min(cursor.offset + batch_size, self.size)
        samples = self.samples(cursor.epoch)[cursor.offset : end]
        if end == self.size:
            after = Cursor(cursor.step + 1, cursor.epoch + 1, 0)
        else:
            after = Cursor(cursor.step + 1, cursor.epoch, end)
        return Draw(cursor, samples, after)

    def _arrange(self, epoch: int) -> NDArray[np.int64]:
        if self.shuffle is True:
            return permutation(self.size, derive("order", self.seed, epoch))
        if self.shuffle is False:
            return np.arange(self.size, dtype=np.int64)
        samples = np.asarray(self.shuffle(self.seed, epoch), dtype=np.int64)
        if samples.shape != (self.size,):
            raise InputError(
                f"shuffle(seed, epoch) gave shape {samples.shape} for epoch {epoch}; it must be ({self.size},)",
                way_out=f"Return {self.size} sample numbers (some may repeat).",
            )
        wrong = samples[(samples < 0) | (samples >= self.size)]
        if wrong.size:
            raise InputError(
                f"shuffle(seed, epoch) gave sample {wrong[0]} for epoch {epoch}; the samples are 0 to {self.size - 1}"
            )
        return samples


def batch_lengths(size: int, batch_size: int, offset: int = 0) -> tuple[int, ...]:
    """The different numbers of samples that steps will hold from an offset on: whole batches and last partial ones."""
    lengths = set()
    for left in (size - offset, size):
        if left >= batch_size:
            lengths.add(batch_size)
        if left % batch_size:
            lengths.add(left % batch_size)
    return tuple(sorted(lengths))
