"""Guards around a pass: buffers are restored, and a loss must not modify weights of a split step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.flat_buffers import FlatLayout
from carpool.runtime.engine.pass_guards import BufferSnapshot
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import TrainingError
from carpool.testing import plain_loop


class Counting(nn.Module):
    """Buffers of two types."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.tensor(3))


def snapshot_of(model: nn.Module) -> BufferSnapshot:
    return BufferSnapshot(FlatLayout(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_buffers_of_all_types_are_restored() -> None:
    model = Counting()
    snapshot = snapshot_of(model)
    snapshot.take()
    model.mean += 1.0
    model.seen += 1
    snapshot.restore()
    assert model.mean.tolist() == [1.0, 2.0]
    assert model.seen.item() == 3


def test_each_step_takes_a_new_snapshot() -> None:
    model = Counting()
    snapshot = snapshot_of(model)
    snapshot.take()
    model.mean += 1.0
    snapshot.take()
    model.mean += 1.0
    snapshot.restore()
    assert model.mean.tolist() == [2.0, 3.0]


def test_buffers_replaced_in_a_step_are_restored() -> None:
    model = Counting()
    snapshot = snapshot_of(model)
    snapshot.take()
    old = model.mean
    model.mean = torch.tensor([8.0, 9.0])
    snapshot.restore()
    assert model.mean is old
    assert model.mean.tolist() == [1.0, 2.0]


def test_buffers_replaced_between_steps_are_kept() -> None:
    model = Counting()
    snapshot = snapshot_of(model)
    snapshot.take()
    new = model.mean = torch.tensor([8.0, 9.0])
    snapshot.take()
    model.mean += 1.0
    snapshot.restore()
    assert model.mean is new
    assert model.mean.tolist() == [8.0, 9.0]
    assert [contents.tolist() for contents in snapshot.contents] == [[8.0, 9.0], 3]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_that_changes_its_shape_is_rejected(in_place: bool) -> None:
    model = Counting()
    snapshot = snapshot_of(model)
    snapshot.take()
    snapshot.check_shapes()
    if in_place:
        model.mean.resize_(3)
    else:
        model.mean = torch.zeros(3)
    with pytest.raises(TrainingError, match=r"'mean' changed its shape from \(2,\) to \(3,\)"):
        snapshot.check_shapes()


def test_a_buffer_assigned_in_a_step_is_rejected() -> None:
    model = Counting()
    model.register_buffer("late", None)
    snapshot = snapshot_of(model)
    snapshot.take()
    snapshot.check_shapes()
    model.late = torch.zeros(3)
    with pytest.raises(TrainingError, match="buffer 'late' was None"):
        snapshot.check_shapes()


def test_a_model_without_buffers_has_an_empty_snapshot() -> None:
    snapshot = snapshot_of(nn.Linear(2, 2))
    snapshot.take()
    snapshot.check_shapes()
    snapshot.restore()
    assert snapshot.contents == []


def renormed(make_training: Any) -> Any:
    """An embedding that renormalizes rows when they are looked up."""
    words = TensorData(torch.arange(200).view(100, 2) % 10, torch.arange(100) % 3)
    torch.manual_seed(0)
    layers = nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3)
    return make_training(dataset=words, model=nn.Sequential(*layers))


def clamped(make_training: Any) -> Any:
    """Weights clamped through .data, which torch's version counter does not see."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        for weight in model.parameters():
            weight.data.clamp_(-0.2, 0.2)
        return cross_entropy(model(batch[0]), batch[1])

    return make_training(loss=loss)


@pytest.mark.parametrize("make", [renormed, clamped])
def test_a_loss_that_modifies_weights_is_rejected_in_a_split_step(make_training: Any, make: Any) -> None:
    with pytest.raises(TrainingError, match=r"weights '0.weight'.* after_update"):
        Trainer(make(make_training), exact=True).step()
    with pytest.raises(TrainingError, match=r"weights '0.weight'.* max_devices = 1"):
        Trainer(make(make_training)).step((20, 16))


@pytest.mark.parametrize("make", [renormed, clamped])
def test_an_unsplit_step_may_modify_weights(make_training: Any, make: Any) -> None:
    trainer = Trainer(make(make_training))
    losses = [done.loss for done in trainer.steps()]
    assert losses == plain_loop(make(make_training)).losses


def test_nan_weights_count_as_unchanged(make_training: Any) -> None:
    training = make_training(model=nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2)), loss=lambda m, b: m[0](b[0]).mean())
    with torch.no_grad():
        training.model[1].weight.fill_(torch.nan)
    Trainer(training, exact=True).step()


def test_frozen_integer_weights_are_allowed(make_training: Any) -> None:
    training = make_training()
    training.model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    Trainer(training, exact=True).step()
