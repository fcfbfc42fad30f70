"""Shared-memory layout: the slot of each rank's contribution in the reduction segment; pure.

    buffer 0: a slot for each maximal subtree of each rank's pieces, in rank order
    buffer 1: the same
    then, if each rank updates a part of the parameters: the updated parameters (param_exchange.py)

Steps alternate between the buffers, so that one barrier per step is enough: a rank writes for step k + 1 after all have
contributed to step k, that is, after all have read the buffer of step k - 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from carpool.runtime.reduce.shards import Subtree, maximal_subtrees

_ALIGN = 64  # bytes
Owners = tuple[tuple[int, int], ...]  # for every rank: first piece, and the one after its last


@dataclass(frozen=True)
class ShmLayout:
    """The layout of a segment, which executor and workers derive from the same owners."""

    owners: Owners
    slot_bytes: int  # `Ready.contribution_bytes`

    @cached_property
    def nodes(self) -> tuple[Subtree, ...]:
        return tuple(itertools.chain.from_iterable(maximal_subtrees(range(*pieces)) for pieces in self.owners))

    @property
    def num_slots(self) -> int:
        """Slots of one buffer."""
        return len(self.nodes)

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_slots * self.slot_bytes

    def offset(self, step: int, slot: int) -> int:
        return ((step % 2) * self.num_slots + slot) * self.slot_bytes


def piece_owners(owners: Owners, size: int, shards: int | None) -> Owners:
    """The owners of the pieces; by default one piece per rank, or in exact mode (``shards``) all for rank 0."""
    if owners:
        return owners
    if shards is None:
        return tuple((rank, rank + 1) for rank in range(size))
    return ((0, shards), *[(shards, shards)] * (size - 1))


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of tensors in a segment."""
    return -(-num_bytes // _ALIGN) * _ALIGN
