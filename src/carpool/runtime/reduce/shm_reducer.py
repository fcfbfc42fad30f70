"""Shared-memory reducer: ranks on one node add all contributions in tree order."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout
from carpool.runtime.engine.forward_backward import Contributions, Step
from carpool.runtime.reduce.shards import Subtree, is_empty, maximal_subtrees, root, tree_sum
from carpool.runtime.reduce.shm_layout import ShmLayout, aligned

_PIN_AFTER = 4  # steps: pinning takes about as long as a few unpinned copies


def pin(memory: Tensor, owner: object) -> bool:
    """Pin a tensor's pages for the lifetime of ``owner``, which must keep them mapped; returns whether that worked.

    Failure (for example a limit on locked pages) only makes copies slower.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        return False
    release = weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
    release.atexit = False  # at exit the driver may be unloaded already
    return True


def contribution_bytes(layout: FlatLayout) -> int:
    """The size of one contribution in a segment."""
    contribution = layout.new()
    return aligned(contribution.values.nbytes) + aligned(contribution.integers.nbytes)


class ShmReducer:
    """A worker's view of the segment; sums are bitwise those of one process, whichever rank owns which pieces.

    The mapping lives as long as this object or a total that was read through it.
    """

    def __init__(self, fd: int, shm_layout: ShmLayout, layout: FlatLayout) -> None:
        self._layout = layout
        self._shm_layout = shm_layout
        self._memory = mmap.mmap(fd, shm_layout.num_bytes)
        self._slot_of = {node: slot for slot, node in enumerate(shm_layout.nodes)}
        empty = layout.new()
        self._num_values, self._num_integers = empty.values.numel(), empty.integers.numel()
        self._buffers = [[self._view(step, slot) for slot in range(shm_layout.num_slots)] for step in (0, 1)]
        self._scratch: list[torch.Tensor] = []  # sums of subtrees; one per level of the tree
        self._own: dict[Subtree, Contribution] = {}  # on a GPU: this rank's contributions, on the device
        self._steps_written = 0

    def clear(self, rank: int) -> None:
        """Zero a rank's slots, which an earlier process group may have used."""
        for buffer in self._buffers:
            for node in self._nodes(rank):
                buffer[self._slot_of[node]].values.zero_()
                buffer[self._slot_of[node]].integers.zero_()

    def slots(self, step: Step, rank: int) -> dict[Subtree, Contribution]:
        if self._layout.device.type != "cpu":
            return {}
        buffer = self._buffers[step.number % 2]
        return {node: buffer[self._slot_of[node]] for node in self._nodes(rank)}

    @property
    def ready(self) -> None:
        """Other ranks read the vector when all have written."""
        return

    def write(self, step: Step, contributions: Contributions) -> None:
        """Write this rank's subtrees; every rank knows from the step which ones are empty.

        On a GPU this waits for the copies, including those that read the step before: its buffer is written next.
        """
        buffer = self._buffers[step.number % 2]
        is_cuda = self._layout.device.type == "cuda"
        self._steps_written += 1
        if is_cuda and self._steps_written == _PIN_AFTER:
            pin(torch.frombuffer(self._memory, dtype=torch.uint8), self)
        self._own = {}
        for node, contribution in contributions:
            slot = buffer[self._slot_of[node]]
            if contribution is not None and contribution is not slot:
                slot.values.copy_(contribution.values, non_blocking=is_cuda)
                slot.integers.copy_(contribution.integers, non_blocking=is_cuda)
                self._own[node] = contribution
        if is_cuda:
            torch.cuda.current_stream(self._layout.device).synchronize()

    @torch.no_grad()
    def total(self, step: Step) -> Contribution:
        free = list(self._scratch)
        sums: set[int] = set()  # tensors that may be added into; contributions are read by other ranks

        def add(left: Contribution, right: Contribution) -> Contribution:
            if id(right.values) in sums:
                free.append(right.values)
            if id(left.values) in sums:
                left += right
                return left
            if not free:
                free.append(torch.empty_like(left.values))
                self._scratch.append(free[-1])
            values = free.pop()
            sums.add(id(values))
            return Contribution(torch.add(left.values, right.values, out=values), left.integers)

        buffer = self._buffers[step.number % 2]
        contributions = [
            (node, None if is_empty(node, step.bounds) else self._on_device(node, buffer[slot]))
            for node, slot in self._slot_of.items()
        ]
        total = tree_sum(contributions, root(len(step.bounds)), add)
        assert total is not None, "a step has samples"
        self._own = {}  # free device memory for the next pass
        return total

    def _nodes(self, rank: int) -> tuple[Subtree, ...]:
        return maximal_subtrees(range(*self._shm_layout.owners[rank]))

    def _view(self, step: int, slot: int) -> Contribution:
        offset = self._shm_layout.offset(step, slot)
        dtype, count = self._layout.dtype, self._num_values
        values = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        if not self._num_integers:
            return Contribution(values, torch.empty(0, dtype=torch.int64))
        offset += aligned(values.nbytes)
        integers = torch.frombuffer(self._memory, dtype=torch.int64, count=self._num_integers, offset=offset)
        return Contribution(values, integers)

    def _on_device(self, node: Subtree, contribution: Contribution) -> Contribution:
        device = self._layout.device
        if device.type == "cpu":
            return contribution
        if own := self._own.get(node):
            return own
        values, integers = (t.to(device, non_blocking=True) for t in (contribution.values, contribution.integers))
        return Contribution(values, integers)
