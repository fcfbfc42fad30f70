"""Sample stream: reads an `IterableDataset` in its own order, so that any step can be read again.

Each epoch calls ``iter(dataset)`` once, after ``dataset.set_epoch(epoch)`` if there is one. Before every sample the
generators are seeded from (seed, epoch, position), as for map-style datasets. So the samples of a step follow from
seed, epoch and position; to resume within an epoch, the samples before are read and skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from carpool.core.errors import InputError
from carpool.runtime.data.sampler import Cursor, Draw
from carpool.runtime.data.tensor_rows import makes_batches
from carpool.runtime.engine.determinism import seed_sample


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be iterated only, not indexed."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__") and not makes_batches(dataset)


class SampleStream:
    """Draws steps from a stream; reads one sample ahead, because the end of an epoch only shows when it is reached."""

    size = 0  # unknown

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._samples: Iterator[Any] = iter(())
        self._first = 0  # position of the first held sample
        self._held: deque[Any] = deque()
        self._is_exhausted = False

    def draw(self, cursor: Cursor, batch_size: int) -> Draw:
        """The next ``batch_size`` samples, or the rest of the epoch."""
        self._seek(cursor.epoch, cursor.offset)
        self._fill(batch_size + 1)
        count = min(batch_size, len(self._held))
        if not count:
            name = type(self._dataset).__name__
            raise InputError(
                f"{name} gave no sample in epoch {cursor.epoch + 1} at position {cursor.offset}",
                way_out="Its __iter__ must start again in every epoch and give the same samples after a resume.",
            )
        end = cursor.offset + count
        is_last = len(self._held) <= batch_size
        after = Cursor(cursor.step + 1, cursor.epoch + is_last, 0 if is_last else end)
        return Draw(cursor, np.arange(cursor.offset, end, dtype=np.int64), after)

    def read(self, epoch: int, positions: NDArray[np.int64]) -> list[Any]:
        """The samples at these positions; they stay readable until a later step is drawn."""
        first, last = int(positions[0]), int(positions[-1])
        if epoch != self._epoch or first < self._first:
            self._seek(epoch, first)
        self._fill(last - self._first + 1)
        return [self._held[int(position) - self._first] for position in positions]

    def _seek(self, epoch: int, offset: int) -> None:
        """Drop the samples before an offset; starts the epoch again if they are needed once more."""
        if epoch != self._epoch or offset < self._first:
            self._start(epoch)
        while self._first < offset:
            self._fill(1)
            if not self._held:
                return
            self._held.popleft()
            self._first += 1

    def _start(self, epoch: int) -> None:
        self._epoch, self._first, self._is_exhausted = epoch, 0, False
        self._held.clear()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        seed_sample(self._seed, epoch, 0)
        self._samples = iter(self._dataset)

    def _fill(self, count: int) -> None:
        while len(self._held) < count and not self._is_exhausted:
            seed_sample(self._seed, self._epoch, self._first + len(self._held))
            try:
                self._held.append(next(self._samples))
            except StopIteration:
                self._is_exhausted = True
