"""A batch of rows gathered where they lie, by numbers that come from the host: all of it can be recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carpool.runtime.vmm import seen_from


class Gathering:
    """One place for batches of some length."""

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        device = tensors[0].device
        self._tensors = tensors
        self._chosen = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = self._chosen
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # where torch does not take it, it is copied
                self._seen = seen_from(device, self._chosen)
        self._index = torch.zeros(count, dtype=torch.int64, device=device)
        self.batch = tuple(rows.new_empty((count, *rows.shape[1:])) for rows in tensors)

    def choose(self, samples: NDArray[np.int64]) -> None:
        """The samples that `gather` will fetch from now on; it must have fetched those chosen before."""
        self._chosen.numpy()[:] = samples

    def gather(self) -> None:
        """Fetch the chosen samples."""
        if self._seen.device == self._index.device:
            torch.add(self._seen, 0, out=self._index)  # by a kernel
        else:
            self._index.copy_(self._seen, non_blocking=True)
        for rows, place in zip(self._tensors, self.batch, strict=True):
            torch.index_select(rows, 0, self._index, out=place)
