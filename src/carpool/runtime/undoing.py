"""The buffers of a model as a step found them: what a pass does to them can be undone."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from carpool.runtime.errors import TrainingError
from carpool.runtime.flat import Layout
from carpool.runtime.rows import by_type

_Rows = list[tuple[list[Tensor], list[Tensor]]]


class Before:
    """A copy of all buffers, in memory that is used again for every step.

    It is taken in every step, and between two steps the caches have forgotten all but the model: each object that is
    looked at costs many times what it would cost in a loop of its own. So what depends on the buffers alone is known
    beforehand, for as long as they are the same tensors.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._rows: _Rows = []
        self.contents: list[Tensor] = []

    def take(self) -> None:
        """Copy the buffers as they are now."""
        buffers = self._layout.buffers()
        if not buffers:
            return
        if len(buffers) != len(self._kept) or not all(map(operator.is_, buffers, self._kept)):
            self._kept = buffers
            self._shapes = [buffer.shape for buffer in buffers]
            self.contents = [torch.empty_like(buffer) for buffer in buffers]
            self._rows = by_type(self.contents, buffers)
        with torch.no_grad():
            for contents, kept in self._rows:
                torch._foreach_copy_(contents, kept)

    def restore(self) -> None:
        """Give the model its buffers back, even those that it has replaced by others."""
        self._layout.put_back(self._kept, self.contents)

    def refuse_growth(self) -> None:
        """Refuse a buffer that has another shape than before, or had none: there is no place for it."""
        self._layout.refuse_new_buffers()
        if not self._kept:
            return
        shapes = [buffer.shape for buffer in self._layout.buffers()]
        if shapes == self._shapes:
            return
        for slot, old, new in zip(self._layout.slots, self._shapes, shapes, strict=True):
            if new != old:
                raise TrainingError(
                    f"buffer {slot.name!r} changed its shape from {tuple(old)} to {tuple(new)} in a step"
                )
