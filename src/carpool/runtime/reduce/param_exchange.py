"""Parameter exchange: ranks that each update some of the parameters share them through shared memory.

A parameter travels with its optimizer state, so that every rank has the whole state at every step boundary and can
publish or save it. A parameter without optimizer state (before its first gradient) has no layout yet, so every rank
updates it; all ranks agree on which these are.

One area is enough: a rank writes for step k + 1 after all have contributed to it, that is, after all have read what was
written for step k.
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
from carpool.runtime.engine.optimizer_set import optimizers_of
from carpool.runtime.reduce.shm_layout import aligned


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter independently: all of torch's except LBFGS."""
    kinds = {type(each) for each in optimizers_of(optimizer)}
    return all(kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS for kind in kinds)


class ParamExchange:
    """The area for updated parameters, after the slots of a segment."""

    def __init__(self, fd: int, offset: int, layout: FlatLayout, optimizer: torch.optim.Optimizer) -> None:
        self._fd, self._offset = os.dup(fd), offset
        weakref.finalize(self, os.close, self._fd)
        self._layout, self._optimizer = layout, optimizer
        self._slots: dict[int, list[Tensor]] = {}
        self.shared: frozenset[int] = frozenset()  # parameters with a slot
        self.update_layout()

    def update_layout(self) -> None:
        """Lay out a slot for every parameter that has optimizer state; the same in every rank."""
        contents = {index: self._contents(index) for index in range(len(self._layout.parameters))}
        shared = frozenset(index for index, tensors in contents.items() if len(tensors) > 1)
        if shared == self.shared:
            return
        end = self._offset + sum(aligned(t.nbytes) for index in shared for t in contents[index])
        if os.fstat(self._fd).st_size < end:
            os.ftruncate(self._fd, end)  # any rank may do this: the file only grows
        memory = mmap.mmap(self._fd, end)
        offset = self._offset
        self._slots = {}
        for index in sorted(shared):
            views = []
            for tensor in contents[index]:
                flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                views.append(flat.as_strided(tensor.shape, tensor.stride()))
                offset += aligned(tensor.nbytes)
            self._slots[index] = views
        self.shared = shared

    @torch.no_grad()
    def write(self, parameters: Sequence[int]) -> None:
        slots, own = self._pairs(parameters)
        if slots:
            foreach_copy_(slots, own)

    @torch.no_grad()
    def read(self, parameters: Sequence[int]) -> None:
        slots, own = self._pairs(parameters)
        if slots:
            foreach_copy_(own, slots)

    def _pairs(self, parameters: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        slots = [slot for index in parameters for slot in self._slots[index]]
        return slots, [tensor for index in parameters for tensor in self._contents(index)]

    def _contents(self, index: int) -> list[Tensor]:
        """A parameter and its optimizer state; only the parameter if the state cannot be copied."""
        parameter = self._layout.parameters[index]
        state = self._optimizer.state.get(parameter, {})
        tensors = [state[key] for key in sorted(state) if state[key] is not None]
        is_plain = all(isinstance(t, Tensor) and t.device.type == "cpu" and _is_dense(t) for t in tensors)
        return [parameter.detach(), *tensors] if is_plain and _is_dense(parameter) else [parameter.detach()]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


@torch.no_grad()
def measure_copy_s(layout: FlatLayout, optimizer: torch.optim.Optimizer) -> float:
    """Measure the seconds per element to copy a parameter with its optimizer state."""
    largest = max(layout.parameters, key=lambda parameter: parameter.numel()).detach()
    state = [t for t in optimizer.state.get(largest, {}).values() if isinstance(t, Tensor)]
    copy = torch.empty_like(largest)
    copy.copy_(largest)  # the first touch of the pages is not measured
    began = time.perf_counter()
    copy.copy_(largest)
    seconds = time.perf_counter() - began
    return seconds / largest.numel() * (1 + sum(t.shape == largest.shape for t in state))
