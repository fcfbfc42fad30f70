"""Shared-memory layout: the slot of each rank's contribution in the reduction segment; pure.

    buffer 0: a slot for each maximal subtree of each rank's pieces, in rank order
    buffer 1: the same
    behind them, where ranks update a range of the parameters each: what they hand over (exchange.py)

Steps take the buffers by turns. That makes one barrier a step enough: whoever writes for step k + 1 has seen that all
have contributed to step k, hence have read what lies in the buffer of step k - 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from carpool.runtime.reduce.shards import Subtree, maximal_nodes

_ALIGN = 64  # bytes
Owners = tuple[tuple[int, int], ...]  # for every rank, its first piece and the one after its last


@dataclass(frozen=True)
class ShmLayout:
    """The plan of a segment; executor and workers work it out alike from the owners."""

    owners: Owners
    slot_bytes: int  # `Ready.segment_bytes`

    @cached_property
    def nodes(self) -> tuple[Subtree, ...]:
        """The subtree of each slot."""
        return tuple(itertools.chain.from_iterable(maximal_nodes(range(*pieces)) for pieces in self.owners))

    @property
    def num_slots(self) -> int:
        """Slots of each buffer."""
        return len(self.nodes)

    @property
    def num_bytes(self) -> int:
        """Of the whole segment."""
        return 2 * self.num_slots * self.slot_bytes

    def offset(self, step: int, slot: int) -> int:
        """Where a slot begins."""
        return ((step % 2) * self.num_slots + slot) * self.slot_bytes


def piece_owners(owners: Owners, size: int, shards: int | None) -> Owners:
    """Who takes which pieces: as said, else a piece each, or in exact mode (``shards``) all for rank 0."""
    if owners:
        return owners
    if shards is None:
        return tuple((rank, rank + 1) for rank in range(size))
    return ((0, shards), *[(shards, shards)] * (size - 1))


def aligned(num_bytes: int) -> int:
    """Up to where the next tensor may begin."""
    return -(-num_bytes // _ALIGN) * _ALIGN
