"""The shared segment of a formation: contributions of all ranks in one memory file, added in tree order by each."""

from __future__ import annotations

import mmap

import torch

from carpool.runtime.flat import Contribution, Layout
from carpool.runtime.passes import Gathered, Step
from carpool.runtime.shards import Node, is_empty, maximal_nodes, root, tree_sum
from carpool.runtime.slots import Slots, padded


def contribution_bytes(layout: Layout) -> int:
    """What one contribution takes in a segment."""
    made = layout.new()
    return padded(made.values.nbytes) + padded(made.integers.nbytes)


class Segment:
    """A worker's view of the segment. Sums are bit for bit those of one process, whoever owns which pieces.

    The mapping lives as long as this object or a total that was read through it.
    """

    def __init__(self, fd: int, slots: Slots, layout: Layout) -> None:
        self._layout = layout
        self._slots = slots
        self._memory = mmap.mmap(fd, slots.num_bytes)
        self._index = {node: slot for slot, node in enumerate(slots.nodes)}
        model = layout.new()
        self._num_values, self._num_integers = model.values.numel(), model.integers.numel()
        self._buffers = [[self._view(step, slot) for slot in range(slots.num_slots)] for step in (0, 1)]
        self._scratch: list[torch.Tensor] = []  # sums of subtrees; as many as the tree is deep

    def clear(self, rank: int) -> None:
        """Wipe a rank's slots, where an earlier formation may have left anything."""
        for buffer in self._buffers:
            for node in maximal_nodes(range(*self._slots.owners[rank])):
                buffer[self._index[node]].values.zero_()
                buffer[self._index[node]].integers.zero_()

    def places(self, step: Step, rank: int) -> dict[Node, Contribution]:
        """Where a rank's subtrees lie, for it to add them up there; none where the memory is not its device's own."""
        if self._layout.device.type != "cpu":
            return {}
        buffer = self._buffers[step.number % 2]
        return {node: buffer[self._index[node]] for node in maximal_nodes(range(*self._slots.owners[rank]))}

    def write(self, step: Step, gathered: Gathered) -> None:
        """Put this rank's subtrees where the others read them; empty ones need no word, all know which they are."""
        buffer = self._buffers[step.number % 2]
        for node, made in gathered:
            place = buffer[self._index[node]]
            if made is not None and made is not place:
                place.values.copy_(made.values)
                place.integers.copy_(made.integers)

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
            (node, None if is_empty(node, step.bounds) else self._near(buffer[slot]))
            for node, slot in self._index.items()
        ]
        total = tree_sum(values, root(len(step.bounds)), add)
        assert total is not None, "a step has samples"
        return total

    def _view(self, step: int, slot: int) -> Contribution:
        offset = self._slots.offset(step, slot)
        dtype, count = self._layout.dtype, self._num_values
        values = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        if not self._num_integers:
            return Contribution(values, torch.empty(0, dtype=torch.int64))
        offset += padded(values.nbytes)
        integers = torch.frombuffer(self._memory, dtype=torch.int64, count=self._num_integers, offset=offset)
        return Contribution(values, integers)

    def _near(self, contribution: Contribution) -> Contribution:
        """The contribution on the device that adds it up."""
        device = self._layout.device
        if device.type == "cpu":
            return contribution
        return Contribution(contribution.values.to(device), contribution.integers.to(device))
