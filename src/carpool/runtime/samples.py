"""From sample numbers to a batch on a device, augmented the same way whoever fetches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from carpool.core.errors import InputError
from carpool.runtime.chance import derive, uniforms
from carpool.runtime.seeding import seed_batch, seed_sample


class Chance:
    """Random numbers for augmentation that follow from (seed, epoch, sample): the cut of the batch cannot matter.

    Each call gives new ones, a row for every sample of the batch.
    """

    def __init__(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> None:
        self._key = derive("augment", seed, epoch)
        self._samples = samples
        self._drawn = 0

    def uniform(self, columns: int = 1) -> Tensor:
        """Numbers in [0, 1) of shape (samples, columns)."""
        drawn = range(self._drawn, self._drawn + columns)
        self._drawn = drawn.stop
        return torch.from_numpy(uniforms(self._key, self._samples, drawn))

    def integers(self, low: int, high: int, columns: int = 1) -> Tensor:
        """Whole numbers in [low, high) of shape (samples, columns)."""
        return (self.uniform(columns) * (high - low)).long().clamp_(max=high - low - 1) + low


Augment = Callable[[Any, Chance], Any]


class Samples:
    """A dataset read in batches: by its ``batch(indices)`` where it has one, else sample by sample."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        augment: Augment | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._augment = augment
        self._collate = collate or default_collate
        self._is_batched = hasattr(dataset, "batch")
        # Seeding takes some 20 µs: it is left out where nobody but our own datasets and torch's collate have a say.
        is_foreign = not type(dataset).__module__.startswith("carpool.runtime.datasets")
        self._may_draw = augment is not None or (is_foreign if self._is_batched else collate is not None)

    def fetch(self, epoch: int, samples: NDArray[np.int64], device: torch.device) -> Any:
        """The batch of these samples, augmented, on the device."""
        rows = [] if self._is_batched else [self._read(epoch, int(sample)) for sample in samples]
        if self._may_draw:  # else what is drawn would follow from what ran here before
            seed_batch(self._seed, epoch, int(samples[0]))
        batch = self._dataset.batch(torch.from_numpy(samples)) if self._is_batched else self._collate(rows)
        if self._augment is not None:
            batch = self._augment(batch, Chance(self._seed, epoch, samples))
            if batch is None:
                raise InputError("augment returned nothing", way_out="Return the batch.")
        return to_device(batch, device)

    def _read(self, epoch: int, sample: int) -> Any:
        seed_sample(self._seed, epoch, sample)
        return self._dataset[sample]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(value, device) for value in batch])
    if isinstance(batch, (list, tuple)):
        return type(batch)([to_device(value, device) for value in batch])
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch
