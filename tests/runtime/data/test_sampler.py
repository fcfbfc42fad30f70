"""Sample order, and random numbers derived from keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError
from carpool.runtime.data.sampler import Cursor, StepSampler, batch_lengths
from carpool.runtime.engine.determinism import derive, permutation, uniforms


def test_numbers_are_the_same_on_every_machine() -> None:
    assert derive("pass", 0, 1, 2) == 8655161399474175778
    assert permutation(8, derive("order", 0, 0)).tolist() == [0, 1, 6, 4, 3, 7, 2, 5]
    drawn = uniforms(derive("augment", 0, 0), np.array([0, 1]), range(2))
    assert drawn.tolist() == [[0.4493449330329895, 0.06203705072402954], [0.8307881355285645, 0.05090987682342529]]


def test_derive_depends_on_every_argument() -> None:
    keys = [derive("a", 1, 23), derive("a", 12, 3), derive("b", 1, 23), derive("a", 1, 23, 0)]
    assert len(set(keys)) == 4
    assert all(0 <= key < 2**63 for key in keys)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 5))
def test_an_epoch_contains_every_sample_once(size: int, batch_size: int, seed: int) -> None:
    order, cursor = StepSampler(size, seed), Cursor()
    seen: list[int] = []
    while cursor.epoch == 0:
        draw = order.draw(cursor, batch_size)
        assert draw.after.step == cursor.step + 1
        assert len(draw.samples) in batch_lengths(size, batch_size)
        seen += draw.samples.tolist()
        cursor = draw.after
    assert sorted(seen) == list(range(size))
    assert cursor == Cursor(-(-size // batch_size), 1, 0)


def test_order_depends_on_seed_and_epoch_only() -> None:
    order = StepSampler(50, seed=3)
    first = order.samples(0).tolist()
    assert order.samples(1).tolist() != first
    assert order.samples(0).tolist() == first
    assert StepSampler(50, seed=4).samples(0).tolist() != first


def test_the_batch_size_may_change_within_an_epoch() -> None:
    order = StepSampler(10, 0, shuffle=False)
    first = order.draw(Cursor(), 4)
    second = order.draw(first.after, 5)
    third = order.draw(second.after, 5)
    assert [d.samples.tolist() for d in (first, second, third)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9]]
    assert [d.ends_epoch for d in (first, second, third)] == [False, False, True]
    assert batch_lengths(10, 5, offset=4) == (1, 5)


def test_a_custom_order() -> None:
    order = StepSampler(4, 0, shuffle=lambda seed, epoch: [3, 3, epoch, seed])
    assert order.draw(Cursor(5, 2, 1), 3).samples.tolist() == [3, 2, 0]
    with pytest.raises(InputError, match=r"shape \(2,\) for epoch 0.*\(4,\)"):
        StepSampler(4, 0, shuffle=lambda seed, epoch: [1, 2]).samples(0)
    with pytest.raises(InputError, match=r"sample 4 for epoch 0.*0 to 3"):
        StepSampler(4, 0, shuffle=lambda seed, epoch: [0, 1, 2, 4]).samples(0)


def test_uniform_numbers_do_not_depend_on_their_neighbours() -> None:
    every = uniforms(7, np.arange(100), range(6))
    assert uniforms(7, np.array([42, 3]), range(2, 4)).tolist() == every[[42, 3], 2:4].tolist()
    assert (every >= 0).all()
    assert (every < 1).all()
    assert abs(every.mean() - 0.5) < 0.05
    assert len(np.unique(every)) == every.size
