"""Early gradients: collects gradients during the backward pass, so that a reducer can send them before it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, as_real
from carpool.runtime.errors import TrainingError

# Called during the backward pass: from this offset of the vector on all gradients are complete.
GradientsReady = Callable[[Contribution, int], None]


class EarlyGradients:
    """Copies each gradient into the vector as soon as the backward pass has accumulated it.

    Backward passes complete gradients roughly from the last layer to the first. Completed ones are reported from the
    end of the vector on, without gaps, so that every rank sends them in the same order.

    Reentrant checkpointing accumulates the gradient of a shared parameter several times in one pass. The first pass
    only counts; a training that does this is never collected early.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._counts = [0] * len(layout.parameters)  # accumulations of each gradient in this pass
        self._num_complete = 0  # gradients at the end of the vector
        self._is_usable: bool | None = None  # None: no pass was counted yet
        self.collected = [False] * len(layout.parameters)  # gradients of this pass that are in the vector

    @contextmanager
    def collecting(self, contribution: Contribution, ready: GradientsReady, *, accumulate: bool) -> Iterator[None]:
        """Collect the gradients of one backward pass, added to what the vector holds if `accumulate`."""
        if self._is_usable is False:
            yield
            return
        self._counts = [0] * len(self._counts)
        collect = None if self._is_usable is None else self._collector(contribution, ready, accumulate=accumulate)
        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, index, collect)
            )
            for index, parameter in enumerate(self._layout.parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._is_usable is None:
            self._is_usable = max(self._counts, default=0) <= 1

    def forget(self) -> None:
        """The next pass starts with no gradient in the vector."""
        self.collected = [False] * len(self.collected)

    def _collector(
        self, contribution: Contribution, ready: GradientsReady, *, accumulate: bool
    ) -> Callable[[int, Tensor], None]:
        views = self._layout.gradient_views(contribution.values)
        offsets = self._layout.gradient_offsets
        self._num_complete = 0

        def collect(index: int, gradient: Tensor) -> None:
            if gradient.is_sparse:  # rejected after the pass
                return
            with torch.no_grad():
                (views[index].add_ if accumulate else views[index].copy_)(as_real(gradient))
            self.collected[index] = True
            before = self._num_complete
            while self._num_complete < len(offsets) and self.collected[-1 - self._num_complete]:
                self._num_complete += 1
            if self._num_complete > before:
                ready(contribution, offsets[-self._num_complete])

        return collect

    def _on_gradient(self, index: int, collect: Callable[[int, Tensor], None] | None, parameter: Tensor) -> None:
        self._counts[index] += 1
        if collect is None or parameter.grad is None:
            return
        if self._counts[index] > 1:
            raise TrainingError(
                f"the gradient of {self._layout.names[index]!r} was accumulated twice in one backward pass, after it "
                "was sent to the other machines. Use torch.utils.checkpoint with use_reentrant=False, or max_nodes = 1."
            )
        collect(index, parameter.grad)
