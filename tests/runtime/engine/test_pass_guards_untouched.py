"""A loss that changes weights while it is computed: refused where a step is cut, as ever where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import TrainingError
from carpool.testing import plain_loop


def renormed(make_training: Any) -> Any:
    """An embedding whose rows are shortened when they are looked up."""
    words = TensorData(torch.arange(200).view(100, 2) % 10, torch.arange(100) % 3)
    torch.manual_seed(0)
    layers = nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3)
    return make_training(dataset=words, model=nn.Sequential(*layers))


def clamped(make_training: Any) -> Any:
    """Weights that are cut off behind torch's back."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        for weight in model.parameters():
            weight.data.clamp_(-0.2, 0.2)
        return cross_entropy(model(batch[0]), batch[1])

    return make_training(loss=loss)


@pytest.mark.parametrize("make", [renormed, clamped])
def test_what_changes_weights_in_a_pass_is_refused_where_a_step_is_cut(make_training: Any, make: Any) -> None:
    with pytest.raises(TrainingError, match=r"changes the weights '0.weight'.* after_update"):
        Trainer(make(make_training), exact=True).step()
    with pytest.raises(TrainingError, match=r"changes the weights '0.weight'.* max_devices = 1"):
        Trainer(make(make_training)).step((20, 16))


@pytest.mark.parametrize("make", [renormed, clamped])
def test_on_one_device_they_are_changed_as_in_any_loop(make_training: Any, make: Any) -> None:
    trainer = Trainer(make(make_training))
    losses = [done.loss for done in trainer.steps()]
    assert losses == plain_loop(make(make_training)).losses


def test_weights_that_are_no_numbers_have_not_changed(make_training: Any) -> None:
    training = make_training(model=nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2)), loss=lambda m, b: m[0](b[0]).mean())
    with torch.no_grad():
        training.model[1].weight.fill_(torch.nan)
    Trainer(training, exact=True).step()


def test_frozen_weights_of_any_kind_are_left_in_peace(make_training: Any) -> None:
    training = make_training()
    training.model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    Trainer(training, exact=True).step()
