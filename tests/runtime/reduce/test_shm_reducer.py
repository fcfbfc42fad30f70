"""The sum read from a segment is bitwise that of one process, whichever rank owns which pieces."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.engine.flat_buffers import Contribution
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.shared_memory import new_memory_file
from carpool.runtime.reduce.shm_layout import Owners, ShmLayout, piece_owners
from carpool.runtime.reduce.shm_reducer import ShmReducer, contribution_bytes


@contextmanager
def segments(trainers: list[Trainer], owned: Owners) -> Iterator[list[ShmReducer]]:
    slots = ShmLayout(owned, contribution_bytes(trainers[0].layout))
    fd = new_memory_file("test", slots.num_bytes)
    os.pwrite(fd, b"\xff" * slots.num_bytes, 0)  # NaN, as an earlier process group may leave it
    yield [ShmReducer(fd, slots, trainer.layout) for trainer in trainers]
    os.close(fd)


def bits(total: Contribution) -> tuple[bytes, bytes]:
    return total.values.numpy().tobytes(), total.integers.numpy().tobytes()


def ranges(sizes: list[int]) -> Owners:
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


OWNERSHIPS = [[8], [4, 4], [3, 5], [1, 1, 6], [5, 0, 3], [1, 2, 3, 2], [1] * 8]


@pytest.mark.parametrize("sizes", OWNERSHIPS, ids=str)
@pytest.mark.parametrize("batch_size", [36, 5], ids=["full", "empty shards"])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_are_those_of_one_process(
    make_training: Any, sizes: list[int], batch_size: int, *, in_place: bool
) -> None:
    options = {"batch_size": batch_size, "batch_norm": batch_size == 36, "stop": Stop(steps=3)}
    alone = Trainer(make_training(**options), exact=True)
    members = [
        Trainer(make_training(**options), exact=True) for _ in range(2)
    ]  # the first stands for all ranks but the last
    with segments(members, ranges(sizes)) as (mine, yours):
        for rank in range(len(sizes)):
            mine.clear(rank)
        while not alone.stop_reason:
            step = alone.next_step()
            expected = alone.combine(step, alone.contribute(step, range(8)))
            for rank, pieces in enumerate(ranges(sizes)):
                member, segment = (members[1], yours) if rank == len(sizes) - 1 else (members[0], mine)
                places = segment.slots(step, rank) if in_place else None
                segment.write(member.next_step(), member.contribute(member.next_step(), range(*pieces), places))
            for member, segment in zip(members, (mine, yours), strict=True):
                own = member.next_step()
                assert bits(segment.total(own)) == bits(expected)
                assert bits(segment.total(own)) == bits(expected), "total() does not change its inputs"
                member.advance(own, member.apply(own, segment.total(own)))
            alone.advance(step, alone.apply(step, expected))


def test_two_successive_steps_use_different_buffers(make_training: Any) -> None:
    trainer = Trainer(make_training(), exact=True)
    with segments([trainer], ((0, 8),)) as (segment,):
        step = trainer.next_step()
        segment.write(step, trainer.contribute(step, range(8)))
        first = bits(segment.total(step))
        trainer.advance(step, trainer.apply(step, segment.total(step)))
        following = trainer.next_step()
        segment.write(following, trainer.contribute(following, range(8)))
        assert bits(segment.total(step)) == first
        assert bits(segment.total(following)) != first


@given(st.integers(1, 6), st.integers(0, 5))
def test_slots_do_not_overlap(num_owners: int, seed: int) -> None:
    sizes = [(seed + 3 * rank) % 5 for rank in range(num_owners)]
    slots = ShmLayout(ranges(sizes), 64)
    offsets = [slots.offset(step, slot) for step in (0, 1) for slot in range(slots.num_slots)]
    assert offsets == list(range(0, slots.num_bytes, 64))
    assert sum(len(node.shards) for node in slots.nodes) == sum(sizes)


def test_default_owners() -> None:
    assert piece_owners((), 3, None) == ((0, 1), (1, 2), (2, 3))
    assert piece_owners((), 2, 8) == ((0, 8), (8, 8))
    assert piece_owners(((0, 3), (3, 8)), 2, 8) == ((0, 3), (3, 8))
