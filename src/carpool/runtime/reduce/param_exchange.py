"""Parameter exchange: ranks share their updated parameters through shared memory.

With a weight goes what the optimizer remembers of it, so that at every step boundary every rank has the whole state: it
can be published, saved or gone on with by any of them. What the optimizer does not remember yet (before a parameter's
first gradient) cannot be laid out, so such a parameter is updated by every rank. All ranks know alike which these are.

One area is enough: whoever writes for step k + 1 has seen all contribute to it, hence take what was there for step k.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import foreach_copy_
from carpool.runtime.engine.flat_buffers import FlatLayout
from carpool.runtime.reduce.shm_layout import aligned


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer treats each parameter by itself: all of torch's but one do; of others we cannot know."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


class ParamExchange:
    """The area behind the slots of a segment where updated parameters lie."""

    def __init__(self, fd: int, offset: int, layout: FlatLayout, optimizer: torch.optim.Optimizer) -> None:
        self._fd, self._offset = os.dup(fd), offset
        weakref.finalize(self, os.close, self._fd)
        self._layout, self._optimizer = layout, optimizer
        self._places: dict[int, list[Tensor]] = {}
        self.known: frozenset[int] = frozenset()
        self.lay_out()

    def lay_out(self) -> None:
        """Find a place for every parameter that the optimizer remembers something of; the same in every rank."""
        contents = {index: self._contents(index) for index in range(len(self._layout.parameters))}
        known = frozenset(index for index, tensors in contents.items() if len(tensors) > 1)
        if known == self.known:
            return
        end = self._offset + sum(aligned(t.nbytes) for index in known for t in contents[index])
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)  # each rank may: it only ever grows
        memory = mmap.mmap(self._fd, end)
        at = self._offset
        self._places = {}
        for index in sorted(known):
            views = []
            for tensor in contents[index]:
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
                views.append(flat.as_strided(tensor.shape, tensor.stride()))
                at += aligned(tensor.nbytes)
            self._places[index] = views
        self.known = known

    @torch.no_grad()
    def give(self, parameters: Sequence[int]) -> None:
        """Put these parameters where the others find them."""
        theirs = [place for index in parameters for place in self._places[index]]
        ours = [tensor for index in parameters for tensor in self._contents(index)]
        if theirs:
            foreach_copy_(theirs, ours)

    @torch.no_grad()
    def take(self, parameters: Sequence[int]) -> None:
        """Take these parameters, which others have updated."""
        theirs = [place for index in parameters for place in self._places[index]]
        ours = [tensor for index in parameters for tensor in self._contents(index)]
        if theirs:
            foreach_copy_(ours, theirs)

    def _contents(self, index: int) -> list[Tensor]:
        """A parameter and all that is remembered of it; only the parameter where that cannot be copied."""
        parameter = self._layout.parameters[index]
        remembered = self._optimizer.state.get(parameter, {})
        tensors = [remembered[key] for key in sorted(remembered) if remembered[key] is not None]
        is_plain = all(isinstance(t, Tensor) and t.device.type == "cpu" and _is_dense(t) for t in tensors)
        return [parameter.detach(), *tensors] if is_plain and _is_dense(parameter) else [parameter.detach()]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@torch.no_grad()
def copying_s(layout: FlatLayout, optimizer: torch.optim.Optimizer) -> float:
    """Seconds per element that copying a parameter with all that is remembered of it takes here; measured."""
    largest = max(layout.parameters, key=lambda parameter: parameter.numel()).detach()
    remembered = [t for t in optimizer.state.get(largest, {}).values() if isinstance(t, Tensor)]
    copy = torch.empty_like(largest)
    copy.copy_(largest)  # pages are touched for the first time
    began = time.perf_counter()
    copy.copy_(largest)
    taken_s = time.perf_counter() - began
    return taken_s / largest.numel() * (1 + sum(t.shape == largest.shape for t in remembered))
