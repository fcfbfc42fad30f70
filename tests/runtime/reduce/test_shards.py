"""The split of a step and its binary tree."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.runtime.reduce.shards import (
    Subtree,
    TreeAdder,
    check_shards,
    is_empty,
    max_micro_batch,
    maximal_subtrees,
    root,
    split_into_parts,
    split_into_shards,
    split_micro_batches,
    tree_sum,
)

SHARDS = st.sampled_from([1, 2, 4, 8, 16, 32])


def owners_of(cuts: list[int], num_shards: int) -> list[range]:
    edges = sorted({0, num_shards, *[cut % (num_shards + 1) for cut in cuts]})
    return list(itertools.starmap(range, itertools.pairwise(edges)))


def join(left: str, right: str) -> str:
    return f"({left}{right})"


def test_shards_of_a_step() -> None:
    assert split_into_shards(100, 8) == (
        *((0, 12), (12, 25), (25, 37), (37, 50)),
        *((50, 62), (62, 75), (75, 87), (87, 100)),
    )
    assert split_into_shards(3, 4) == ((0, 0), (0, 1), (1, 2), (2, 3))


@given(st.integers(1, 500), SHARDS)
def test_shards_cover_every_sample_once(num_samples: int, num_shards: int) -> None:
    bounds = split_into_shards(num_samples, num_shards)
    assert [i for start, end in bounds for i in range(start, end)] == list(range(num_samples))


@pytest.mark.parametrize(
    ("num_samples", "parts", "least", "sizes"),
    [
        (128, (96, 32), 1, [96, 32]),
        (28, (96, 32), 1, [21, 7]),
        (10, (1, 1, 1), 1, [3, 3, 4]),
        (3, (1, 1, 1), 2, [3, 0, 0]),
        (5, (4, 1), 2, [5, 0]),
        (5, (1, 4), 2, [0, 5]),
        (1, (1, 1), 2, [0, 1]),
        (7, (0, 7, 0), 1, [0, 7, 0]),
    ],
)
def test_parts_are_proportional(num_samples: int, parts: tuple[int, ...], least: int, sizes: list[int]) -> None:
    assert [end - start for start, end in split_into_parts(num_samples, parts, least)] == sizes


@given(st.integers(2, 300), st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(1, 2))
def test_parts_cover_every_sample_once_and_hold_enough(num_samples: int, parts: list[int], least: int) -> None:
    bounds = split_into_parts(num_samples, parts, least)
    assert [i for start, end in bounds for i in range(start, end)] == list(range(num_samples))
    assert all(end - start == 0 or end - start >= least for start, end in bounds)


@given(st.integers(0, 50), st.integers(1, 200), st.integers(0, 60))
def test_micro_batches_cover_every_sample_once_within_the_limit(start: int, size: int, most: int) -> None:
    micro_batches = split_micro_batches(start, start + size, most)
    assert [sample for first, stop in micro_batches for sample in range(first, stop)] == list(
        range(start, start + size)
    )
    sizes = [stop - first for first, stop in micro_batches]
    assert max(sizes) <= (most or size)
    assert max(sizes) - min(sizes) <= 1


def test_a_limit_holds_from_its_step_on() -> None:
    limits = ((5, 18), (7, 20), (9, 4))
    assert [max_micro_batch(limits, step) for step in (4, 5, 8, 9)] == [0, 18, 18, 4]


def test_parts_without_samples_are_rejected() -> None:
    with pytest.raises(InputError, match=r"parts are \(0, 0\)"):
        split_into_parts(8, (0, 0))


@pytest.mark.parametrize("number", [0, 3, 6, 12])
def test_shards_are_a_power_of_two(number: int) -> None:
    with pytest.raises(InputError, match=f"shards is {number}.*power of two"):
        check_shards(number)


def test_maximal_subtrees_of_a_range() -> None:
    assert maximal_subtrees(range(8)) == (Subtree(3, 0),)
    assert maximal_subtrees(range(1, 8)) == (Subtree(0, 1), Subtree(1, 1), Subtree(2, 1))
    assert maximal_subtrees(range(3, 6)) == (Subtree(0, 3), Subtree(1, 2))
    assert maximal_subtrees(range(4, 4)) == ()


@given(SHARDS, st.data())
def test_maximal_subtrees_are_maximal_and_cover_the_range(num_shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_shards - 1))
    owned = range(start, data.draw(st.integers(start + 1, num_shards)))
    nodes = maximal_subtrees(owned)
    assert [shard for node in nodes for shard in node.shards] == list(owned)
    assert not any(set(node.parent.shards) <= set(owned) for node in nodes)


@given(SHARDS, st.data())
def test_adding_shard_by_shard_gives_the_maximal_subtrees(num_shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_shards - 1))
    owned = range(start, data.draw(st.integers(start + 1, num_shards)))
    adder: TreeAdder[str] = TreeAdder(join)
    for shard in owned:
        adder.put(Subtree(0, shard), str(shard))
    assert tuple(node for node, _ in adder.held) == maximal_subtrees(owned)


@given(st.integers(1, 70), SHARDS, st.lists(st.integers(0, 64), max_size=6))
def test_every_ownership_adds_in_the_same_order(num_samples: int, num_shards: int, cuts: list[int]) -> None:
    bounds = split_into_shards(num_samples, num_shards)
    leaves = [None if start == end else chr(ord("A") + shard) for shard, (start, end) in enumerate(bounds)]
    alone = tree_sum([(Subtree(0, shard), leaf) for shard, leaf in enumerate(leaves)], root(num_shards), join)
    nodes: list[Subtree] = []
    slots: list[str | None] = []
    for owned in owners_of(cuts, num_shards):
        adder: TreeAdder[str] = TreeAdder(join)
        for shard in owned:
            adder.put(Subtree(0, shard), leaves[shard])
        nodes += [node for node, _ in adder.held]
        slots += [value for _, value in adder.held]
    assert tree_sum(zip(nodes, slots, strict=True), root(num_shards), join) == alone
    assert [slot is None for slot in slots] == [is_empty(node, bounds) for node in nodes]


def test_the_tree_is_balanced_and_skips_empty_leaves() -> None:
    leaves = [(Subtree(0, i), leaf) for i, leaf in enumerate(["a", None, "c", "d", "e"])]
    assert tree_sum(leaves, root(5), join) == "((a(cd))e)"
    assert root(1) == Subtree(0, 0)
    assert root(5) == Subtree(3, 0)
