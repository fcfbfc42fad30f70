"""Shared-memory reducer: ranks on one node add all contributions in tree order.

Copies of pages that are not go through a buffer of the driver's, by the processor, at a fraction of the link's speed.
Registering takes about as long as a few such copies, so it is for memory that is used again and again.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout
from carpool.runtime.engine.forward_backward import Contributions, Step
from carpool.runtime.reduce.shards import Subtree, is_empty, maximal_nodes, root, tree_sum
from carpool.runtime.reduce.shm_layout import ShmLayout, aligned


def pin(memory: Tensor, owner: object) -> bool:
    """Register a tensor's pages as long as ``owner`` lives, which must keep them mapped; whether that worked.

    Without it copies are slower and nothing else is different, so a refusal (pages that may not be locked) is no error.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        return False
    release = weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr())
    release.atexit = False  # the process takes its pages along, and the driver may be gone by then
    return True


_PIN_AFTER = 4  # steps: a formation that ends sooner would not repay the effort


def contribution_bytes(layout: FlatLayout) -> int:
    """What one contribution takes in a segment."""
    made = layout.new()
    return aligned(made.values.nbytes) + aligned(made.integers.nbytes)


class ShmReducer:
    """A worker's view of the segment. Sums are bit for bit those of one process, whoever owns which pieces.

    The mapping lives as long as this object or a total that was read through it.
    """

    def __init__(self, fd: int, slots: ShmLayout, layout: FlatLayout) -> None:
        self._layout = layout
        self._slots = slots
        self._memory = mmap.mmap(fd, slots.num_bytes)
        self._index = {node: slot for slot, node in enumerate(slots.nodes)}
        model = layout.new()
        self._num_values, self._num_integers = model.values.numel(), model.integers.numel()
        self._buffers = [[self._view(step, slot) for slot in range(slots.num_slots)] for step in (0, 1)]
        self._scratch: list[torch.Tensor] = []  # sums of subtrees; as many as the tree is deep
        self._own: dict[Subtree, Contribution] = {}  # on a GPU: what this rank has given to the step, where it was made
        self._written = 0

    def clear(self, rank: int) -> None:
        """Wipe a rank's slots, where an earlier formation may have left anything."""
        for buffer in self._buffers:
            for node in maximal_nodes(range(*self._slots.owners[rank])):
                buffer[self._index[node]].values.zero_()
                buffer[self._index[node]].integers.zero_()

    def places(self, step: Step, rank: int) -> dict[Subtree, Contribution]:
        """Where a rank's subtrees lie, for it to add them up there; none where the memory is not its device's own."""
        if self._layout.device.type != "cpu":
            return {}
        buffer = self._buffers[step.number % 2]
        return {node: buffer[self._index[node]] for node in maximal_nodes(range(*self._slots.owners[rank]))}

    def write(self, step: Step, gathered: Contributions) -> None:
        """Put this rank's subtrees where the others read them; empty ones need no word, all know which they are.

        On a GPU the copies end here, and so do those by which the step before was read: others may write there next.
        """
        buffer = self._buffers[step.number % 2]
        is_cuda = self._layout.device.type == "cuda"
        self._written += 1
        if is_cuda and self._written == _PIN_AFTER:
            pin(torch.frombuffer(self._memory, dtype=torch.uint8), self)
        self._own = {}
        for node, made in gathered:
            place = buffer[self._index[node]]
            if made is not None and made is not place:
                place.values.copy_(made.values, non_blocking=is_cuda)
                place.integers.copy_(made.integers, non_blocking=is_cuda)
                self._own[node] = made
        if is_cuda:
            torch.cuda.current_stream(self._layout.device).synchronize()

    @torch.no_grad()
    def total(self, step: Step) -> Contribution:
        """The sum of all contributions to a step; to be read only, and until the next call."""
        free = list(self._scratch)
        mine: set[int] = set()  # the sums, which may be added into; contributions are read by others too

        def add(left: Contribution, right: Contribution) -> Contribution:
            if id(right.values) in mine:
                free.append(right.values)
            if id(left.values) in mine:
                left += right
                return left
            if not free:
                free.append(torch.empty_like(left.values))
                self._scratch.append(free[-1])
            values = free.pop()
            mine.add(id(values))
            return Contribution(torch.add(left.values, right.values, out=values), left.integers)

        buffer = self._buffers[step.number % 2]
        values = [
            (node, None if is_empty(node, step.bounds) else self._near(node, buffer[slot]))
            for node, slot in self._index.items()
        ]
        total = tree_sum(values, root(len(step.bounds)), add)
        assert total is not None, "a step has samples"
        self._own = {}  # the device's memory is wanted for the next pass
        return total

    def _view(self, step: int, slot: int) -> Contribution:
        offset = self._slots.offset(step, slot)
        dtype, count = self._layout.dtype, self._num_values
        values = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        if not self._num_integers:
            return Contribution(values, torch.empty(0, dtype=torch.int64))
        offset += aligned(values.nbytes)
        integers = torch.frombuffer(self._memory, dtype=torch.int64, count=self._num_integers, offset=offset)
        return Contribution(values, integers)

    def _near(self, node: Subtree, contribution: Contribution) -> Contribution:
        """The contribution on the device that adds it up."""
        device = self._layout.device
        if device.type == "cpu":
            return contribution
        if own := self._own.get(node):
            return own
        values, integers = (t.to(device, non_blocking=True) for t in (contribution.values, contribution.integers))
        return Contribution(values, integers)
