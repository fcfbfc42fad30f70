"""Shards of a step and the binary tree in which their gradients are added; pure.

Floating-point addition is not associative, so a sum is the same for every number of owners only if every owner adds in
the same order. The order is one binary tree over the V shards. An owner of shards [a, b) can add up, alone, exactly the
*maximal aligned subtrees* inside its range; the rest of the tree is added across owners, in tree order. A shard without
samples takes no part: its sibling passes unchanged (adding zero would turn -0.0 into 0.0).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from carpool.core.errors import InputError

T = TypeVar("T")
Bounds = tuple[tuple[int, int], ...]  # for each piece of a step, its first sample and the one after its last
Limits = tuple[tuple[int, int], ...]  # (step, most samples in a pass from it on)


def cut_into_shards(num_samples: int, num_shards: int) -> Bounds:
    """Shard s of V holds the samples [s·n//V, (s+1)·n//V) of a step's n."""
    return tuple((s * num_samples // num_shards, (s + 1) * num_samples // num_shards) for s in range(num_shards))


def cut_into_parts(num_samples: int, parts: Sequence[int], least: int = 1) -> Bounds:
    """One part per device, in proportion to ``parts``: a whole batch is cut as said, a last partial one alike.

    A part that would hold some samples but fewer than ``least`` hands them to the largest one (a batch-normalised part
    needs two).
    """
    whole = sum(parts)
    if whole <= 0 or min(parts) < 0:
        raise InputError(f"parts are {tuple(parts)}; each must be at least 0 and one of them positive")
    ends = [end * num_samples // whole for end in itertools.accumulate(parts)]
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    largest = sizes.index(max(sizes))
    for part, size in enumerate(sizes):
        if 0 < size < least and part != largest:
            sizes[largest] += size
            sizes[part] = 0
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def cut_into_passes(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """A stretch of samples as passes of nearly equal length, none longer than ``most`` (0: one pass)."""
    size = end - start
    number = -(-size // most) if most else 1
    return [(start + i * size // number, start + (i + 1) * size // number) for i in range(number)]


def most_samples(limits: Limits, step: int) -> int:
    """The most samples that a pass of a step may hold; 0: any number."""
    return min((samples for first, samples in limits if first <= step), default=0) if limits else 0


def check_batchnorm_samples(length: int, batch_size: int, size: int, num_shards: int, norm: str) -> None:
    """Refuse a batch that leaves a shard without the two samples that BatchNorm needs; there are ``size`` in all."""
    if length < 2 * num_shards:
        last = "the last batch of an epoch" if length < batch_size else "a batch"
        raise InputError(
            f"{last} holds {length} samples; cut into {num_shards} shards some hold fewer than the 2 that "
            f"BatchNorm ({norm}) needs",
            way_out=f"Choose a batch size that leaves at least {2 * num_shards} of {size} samples, fewer shards, "
            "or exact = false.",
        )


def check_shards(num_shards: int) -> None:
    """Refuse a number of shards that has no binary tree."""
    if num_shards < 1 or num_shards & (num_shards - 1):
        near = 1 << max(num_shards, 1).bit_length() - 1
        raise InputError(
            f"{num_shards} shards; the number of logical shards must be a power of two",
            way_out=f"Take {near} or {2 * near}.",
        )


@dataclass(frozen=True, slots=True, order=True)
class Subtree:
    """An aligned subtree: the shards [index·2^level, (index+1)·2^level)."""

    level: int
    index: int

    @property
    def shards(self) -> range:
        """The leaves below it."""
        return range(self.index << self.level, (self.index + 1) << self.level)

    @property
    def parent(self) -> Subtree:
        """The subtree one level up."""
        return Subtree(self.level + 1, self.index >> 1)

    def is_left_of(self, other: Subtree) -> bool:
        """Whether the two are the left and right half of one parent."""
        return self.level == other.level and self.index + 1 == other.index and not self.index & 1


def root(num_pieces: int) -> Subtree:
    """The whole tree over the pieces of a step; where they are no power of two, the last leaves stay empty."""
    return Subtree((num_pieces - 1).bit_length(), 0)


def maximal_nodes(owned: range) -> tuple[Subtree, ...]:
    """The largest aligned subtrees that fill a range of shards, from left to right."""
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
    """Adds values of subtrees in tree order as they come, from left to right; ``None`` stands for an empty subtree.

    What is held afterwards are the maximal aligned subtrees of all shards put in: a worker that puts in its shards one
    by one never holds more than one value per level of the tree.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.held: list[tuple[Subtree, T | None]] = []

    def put(self, node: Subtree, value: T | None) -> None:
        """Take the next subtree on the right, and add up whatever it completes."""
        assert not self.held or self.held[-1][0].shards.stop == node.shards.start, "subtrees come from left to right"
        while self.held and self.held[-1][0].is_left_of(node):
            left = self.held.pop()[1]
            if left is not None:
                value = left if value is None else self._add(left, value)
            node = node.parent
        self.held.append((node, value))

    def close(self, top: Subtree) -> T | None:
        """The value of the whole tree, the leaves not put in being empty."""
        while self.held[-1][0] != top:
            stop = self.held[-1][0].shards.stop
            level = (stop & -stop).bit_length() - 1
            self.put(Subtree(level, stop >> level), None)
        return self.held[-1][1]


def tree_sum(values: Iterable[tuple[Subtree, T | None]], top: Subtree, add: Callable[[T, T], T]) -> T | None:
    """Add the values of subtrees, whoever made them, in the order of the tree below ``top``."""
    gather = TreeAdder(add)
    for node, value in sorted(values, key=lambda item: item[0].shards.start):
        gather.put(node, value)
    return gather.close(top)


def is_empty(node: Subtree, bounds: Bounds) -> bool:
    """Whether no piece below a node holds a sample."""
    return all(start == end for start, end in bounds[node.shards.start : node.shards.stop])
