"""Declarations of trainings and stop conditions, and the errors of wrong ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from carpool.core.errors import InputError
from carpool.runtime.engine.stop_criteria import Best, MetricGoal, Stop
from carpool.runtime.engine.training import as_metrics

OTHER = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 101}, r"batch_size is 101; .*100 samples"),
        ({"batch_size": 0}, r"Training\(batch_size=0\).* at least 1"),
        ({"batch_size": 2.5}, r"Training\(batch_size=2\.5\)"),
        ({"stop": None}, r"Training\(stop=…\) is missing.*carpool\.Stop"),
        ({"loss": None}, "neither of loss and step"),
        ({"loss": 3}, r"Training\(loss=…\) is a int"),
        ({"evaluate": 3}, r"Training\(evaluate=…\) is a int"),
        ({"dataset": object()}, "neither be indexed nor iterated.*map-style"),
        ({"dataset": iter([1])}, "only once.*IterableDataset"),
        (
            {"optimizer": lambda p: torch.optim.SGD(OTHER.parameters(), lr=1)},
            "2 of the 2 parameters of SGD",
        ),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS.*closure"),
        ({"schedule": lambda o: 3}, r"Training\(schedule=…\) is a int.*LRScheduler"),
        (
            {"schedule": lambda o: lr_scheduler.StepLR(torch.optim.SGD(OTHER.parameters(), lr=1), 1)},
            r"Training\(schedule=…\).*different optimizer",
        ),
        ({"schedule_every": "day"}, "schedule_every is 'day'.*'step', 'epoch' or 'evaluation'"),
        ({"schedule_every": "evaluation"}, "schedule_every='evaluation' needs evaluate=…"),
        ({"schedule": lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau.*schedule_every='evaluation'"),
        ({"clip_norm": 0}, "clip_norm is 0.*positive"),
        ({"autocast": "int8"}, "autocast is 'int8'.*'bf16' or 'fp16'"),
        ({"precision": "bf16"}, "precision is 'bf16'.*'float32' or 'tf32'"),
        ({"best": "max accuracy"}, "best='max accuracy' needs evaluate=…"),
        ({"stop": Stop(target_metric="a >= 1")}, "target_metric='a >= 1' needs evaluate=…"),
        ({"evaluate": len, "best": "accuracy"}, "best is 'accuracy'.*'max accuracy'"),
        ({"evaluate_every": 0}, "evaluate_every is 0.*from 1"),
        ({"state": {"ema": 3}}, r"state\['ema'\] is a int.*load_state_dict"),
        ({"shuffle": "yes"}, r"Training\(shuffle=…\) is a str"),
    ],
)
def test_wrong_declarations_are_rejected(make_training: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_training(**changes)


def test_tensors_that_cannot_be_copied_in_place_are_rejected(make_training: Any) -> None:
    model = nn.Linear(6, 3)
    model.register_buffer("graph", torch.eye(6).to_sparse())
    with pytest.raises(InputError, match="buffer 'graph' of the model is sparse"):
        make_training(model=model)
    with pytest.raises(InputError, match="parameter 'weight' of the model has no shape"):
        make_training(model=nn.LazyLinear(3))


def test_nothing_to_train(make_training: Any) -> None:
    frozen = nn.Linear(6, 3).requires_grad_(False)
    with pytest.raises(InputError, match="Adam holds no parameter that requires a gradient"):
        make_training(model=frozen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"Stop\(\).*epochs, steps, target_loss, target_metric"),
        ({"epochs": 0}, r"Stop\(epochs=0\).*2\*\*53"),
        ({"steps": 1.5}, r"Stop\(steps=1\.5\)"),
        ({"steps": 1, "window": 0}, r"Stop\(window=0\)"),
        ({"target_loss": float("nan")}, r"Stop\(target_loss=nan\)"),
        ({"target_loss": 10**400}, r"Stop\(target_loss=about 2\*\*1329\); it must be a finite number"),
        ({"target_loss": "0.1"}, r"Stop\(target_loss='0\.1'\)"),
        ({"target_metric": "accuracy > 0.9"}, r"target_metric 'accuracy > 0\.9'"),
        ({"target_metric": "accuracy >= much"}, "target_metric 'accuracy >= much'"),
    ],
)
def test_wrong_stop_conditions_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stop(**arguments)


def test_the_maximum_number_of_steps() -> None:
    assert Stop(epochs=3).most_steps(10) == 30
    assert Stop(epochs=3, steps=12).most_steps(10) == 12
    assert Stop(target_loss=0.1).most_steps(10) is None


def test_goals_are_parsed() -> None:
    assert MetricGoal.parse(" top 1 >= 0.5") == MetricGoal("top 1", True, 0.5)
    assert MetricGoal.parse("loss<=1e-3") == MetricGoal("loss", False, 1e-3)
    assert Best.parse("min loss") == Best("loss", False)


def test_metrics_are_converted_to_floats() -> None:
    assert as_metrics(0.5) == {"metric": 0.5}
    assert as_metrics({"k\n\x00": 2.0}) == {"k \\x00": 2.0}
    assert as_metrics({"a": torch.tensor(2.0), "b": 1}) == {"a": 2.0, "b": 1.0}
    with pytest.raises(InputError, match=r"evaluate returned a Tensor of shape \(2,\) for 'a'"):
        as_metrics({"a": torch.zeros(2)})
    with pytest.raises(InputError, match="evaluate returned None for 'metric'"):
        as_metrics(None)


@pytest.mark.parametrize("number", [np.int64(8), np.uint8(8), torch.tensor(8), 8])
def test_whole_numbers_of_numpy_and_torch_are_taken(number: Any) -> None:
    stop = Stop(steps=number, epochs=number, window=number, patience=number)
    assert [(type(value), value) for value in (stop.steps, stop.epochs, stop.window, stop.patience)] == [(int, 8)] * 4


@pytest.mark.parametrize(
    "number", [True, np.bool_(True), torch.tensor(True), torch.tensor(2.0), np.float32(2), "2", 2.5]
)
def test_other_values_are_no_whole_numbers(number: Any) -> None:
    with pytest.raises(InputError):
        Stop(steps=number)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"a": 10**400}, "about 2**1329"),
        ({"a": None}, "None"),
        ({"k" * 1000: 1.0}, "200"),
        ({str(number): 1.0 for number in range(5000)}, "4096"),
    ],
)
def test_metrics_out_of_range_are_rejected_with_the_value(returned: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        as_metrics(returned)
    assert named in str(caught.value)
