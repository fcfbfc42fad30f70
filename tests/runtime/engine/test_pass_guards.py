"""Buffers as a step found them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from carpool.runtime.engine.flat_buffers import FlatLayout
from carpool.runtime.engine.pass_guards import BufferSnapshot
from carpool.runtime.errors import TrainingError


class Counting(nn.Module):
    """Buffers of two types."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.tensor(3))


def before_of(model: nn.Module) -> BufferSnapshot:
    return BufferSnapshot(FlatLayout(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_buffers_of_all_types_come_back() -> None:
    model = Counting()
    before = before_of(model)
    before.take()
    model.mean += 1.0
    model.seen += 1
    before.restore()
    assert model.mean.tolist() == [1.0, 2.0]
    assert model.seen.item() == 3


def test_each_step_begins_from_what_the_one_before_left() -> None:
    model = Counting()
    before = before_of(model)
    before.take()
    model.mean += 1.0
    before.take()
    model.mean += 1.0
    before.restore()
    assert model.mean.tolist() == [2.0, 3.0]


def test_buffers_that_were_replaced_in_a_step_are_the_old_ones_again() -> None:
    model = Counting()
    before = before_of(model)
    before.take()
    old = model.mean
    model.mean = torch.tensor([8.0, 9.0])
    before.restore()
    assert model.mean is old
    assert model.mean.tolist() == [1.0, 2.0]


def test_buffers_that_were_replaced_between_steps_are_those_that_count() -> None:
    model = Counting()
    before = before_of(model)
    before.take()
    new = model.mean = torch.tensor([8.0, 9.0])
    before.take()
    model.mean += 1.0
    before.restore()
    assert model.mean is new
    assert model.mean.tolist() == [8.0, 9.0]
    assert [contents.tolist() for contents in before.contents] == [[8.0, 9.0], 3]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_that_grows_is_refused_by_name(in_place: bool) -> None:
    model = Counting()
    before = before_of(model)
    before.take()
    before.refuse_growth()
    if in_place:
        model.mean.resize_(3)
    else:
        model.mean = torch.zeros(3)
    with pytest.raises(TrainingError, match=r"'mean' changed its shape from \(2,\) to \(3,\)"):
        before.refuse_growth()


def test_a_buffer_that_is_only_filled_in_a_step_is_refused_by_name() -> None:
    model = Counting()
    model.register_buffer("late", None)
    before = before_of(model)
    before.take()
    before.refuse_growth()
    model.late = torch.zeros(3)
    with pytest.raises(TrainingError, match="'late' was None when the training began"):
        before.refuse_growth()


def test_a_model_without_buffers_has_nothing_to_undo() -> None:
    before = before_of(nn.Linear(2, 2))
    before.take()
    before.refuse_growth()
    before.restore()
    assert before.contents == []
