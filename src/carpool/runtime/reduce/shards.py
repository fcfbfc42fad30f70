"""Shards of a step and the binary tree in which their gradients are added; pure.

Floating-point addition is not associative, so the sum is the same for every number of ranks only if all add in the same
order: one binary tree over the V shards. A rank that owns shards [a, b) sums the *maximal aligned subtrees* of its
range; the rest of the tree is added across ranks, in tree order. A shard without samples is skipped: its sibling is
passed up unchanged (adding zero would turn -0.0 into 0.0).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from carpool.core.errors import InputError

T = TypeVar("T")
Bounds = tuple[tuple[int, int], ...]  # for each piece of a step: first sample, and the one after its last
MicroBatchLimits = tuple[tuple[int, int], ...]  # (step, maximum samples in a pass from this step on)


def split_into_shards(num_samples: int, num_shards: int) -> Bounds:
    """Split the n samples of a step: shard s of V holds [s·n//V, (s+1)·n//V)."""
    return tuple((s * num_samples // num_shards, (s + 1) * num_samples // num_shards) for s in range(num_shards))


def split_into_parts(num_samples: int, parts: Sequence[int], least: int = 1) -> Bounds:
    """Split the samples of a step into one part per device, in proportion to ``parts``.

    A part with fewer than ``least`` samples gives them to the largest one (BatchNorm needs two).
    """
    whole = sum(parts)
    if whole <= 0 or min(parts) < 0:
        raise InputError(f"parts are {tuple(parts)}; each must be at least 0 and at least one positive")
    ends = [end * num_samples // whole for end in itertools.accumulate(parts)]
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    largest = sizes.index(max(sizes))
    for part, size in enumerate(sizes):
        if 0 < size < least and part != largest:
            sizes[largest] += size
            sizes[part] = 0
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def split_micro_batches(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """Split a range of samples into micro-batches of nearly equal size, at most ``most`` each (0: no limit)."""
    size = end - start
    number = -(-size // most) if most else 1
    return [(start + i * size // number, start + (i + 1) * size // number) for i in range(number)]


def max_micro_batch(limits: MicroBatchLimits, step: int) -> int:
    """The maximum number of samples in a pass of a step; 0: no limit."""
    return min((samples for first, samples in limits if first <= step), default=0) if limits else 0


def check_batchnorm_samples(length: int, batch_size: int, size: int, num_shards: int, norm: str) -> None:
    """Reject a batch that leaves a shard fewer than the two samples that BatchNorm needs; ``size`` is the dataset's."""
    if length < 2 * num_shards:
        last = "the last batch of an epoch" if length < batch_size else "a batch"
        raise InputError(
            f"{last} has {length} samples; split into {num_shards} shards, some have fewer than the 2 that "
            f"BatchNorm ({norm}) needs",
            way_out=f"Choose a batch size that splits the {size} samples into batches of at least {2 * num_shards}, "
            "fewer shards, or exact = false.",
        )


def check_shards(num_shards: int) -> None:
    """Reject a number of shards that is not a power of two."""
    if num_shards < 1 or num_shards & (num_shards - 1):
        near = 1 << max(num_shards, 1).bit_length() - 1
        raise InputError(
            f"shards is {num_shards}; it must be a power of two",
            way_out=f"Use {near} or {2 * near}.",
        )


@dataclass(frozen=True, slots=True, order=True)
class Subtree:
    """An aligned subtree: the shards [index·2^level, (index+1)·2^level)."""

    level: int
    index: int

    @property
    def shards(self) -> range:
        return range(self.index << self.level, (self.index + 1) << self.level)

    @property
    def parent(self) -> Subtree:
        return Subtree(self.level + 1, self.index >> 1)

    def is_left_of(self, other: Subtree) -> bool:
        return self.level == other.level and self.index + 1 == other.index and not self.index & 1


def root(num_pieces: int) -> Subtree:
    """The tree over all pieces of a step, with empty leaves up to a power of two."""
    return Subtree((num_pieces - 1).bit_length(), 0)


def maximal_subtrees(owned: range) -> tuple[Subtree, ...]:
    """The largest aligned subtrees that cover a range of shards, from left to right."""
    nodes = []
    start, stop = owned.start, owned.stop
    while start < stop:
        level = (stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        nodes.append(Subtree(level, start >> level))
        start += 1 << level
    return tuple(nodes)


class TreeAdder(Generic[T]):
    """Adds the values of subtrees, given from left to right, in tree order; ``None`` is an empty subtree.

    It holds the maximal aligned subtrees of the shards so far, at most one per level of the tree.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.held: list[tuple[Subtree, T | None]] = []

    def put(self, node: Subtree, value: T | None) -> None:
        assert not self.held or self.held[-1][0].shards.stop == node.shards.start, "subtrees come from left to right"
        while self.held and self.held[-1][0].is_left_of(node):
            left = self.held.pop()[1]
            if left is not None:
                value = left if value is None else self._add(left, value)
            node = node.parent
        self.held.append((node, value))

    def close(self, top: Subtree) -> T | None:
        """The value of the whole tree; missing leaves are empty."""
        while self.held[-1][0] != top:
            stop = self.held[-1][0].shards.stop
            level = (stop & -stop).bit_length() - 1
            self.put(Subtree(level, stop >> level), None)
        return self.held[-1][1]


def tree_sum(values: Iterable[tuple[Subtree, T | None]], top: Subtree, add: Callable[[T, T], T]) -> T | None:
    """Add the values of subtrees, given in any order, in the order of the tree below ``top``."""
    adder = TreeAdder(add)
    for node, value in sorted(values, key=lambda item: item[0].shards.start):
        adder.put(node, value)
    return adder.close(top)


def is_empty(node: Subtree, bounds: Bounds) -> bool:
    """Whether no piece of a subtree has samples."""
    return all(start == end for start, end in bounds[node.shards.start : node.shards.stop])
