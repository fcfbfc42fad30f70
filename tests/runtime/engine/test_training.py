"""What may be declared, and what is said about the rest."""

from __future__ import annotations

from typing import Any

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
        ({"batch_size": 101}, r"batch_size is 101; the data holds 100 samples\. Lower batch_size or bring more data"),
        ({"batch_size": 0}, r"Training\(batch_size=0\); it must be a whole number of at least 1"),
        ({"batch_size": 2.5}, r"Training\(batch_size=2\.5\)"),
        ({"stop": None}, r"Training\(stop=…\) is missing; it must be a carpool\.Stop, for example Stop\(epochs=20\)"),
        ({"loss": None}, r"Training\(loss=…\) is missing; it must be a function"),
        ({"loss": 3}, r"Training\(loss=…\) is a int; it must be a function"),
        ({"evaluate": 3}, r"Training\(evaluate=…\) is a int; it must be a function"),
        ({"dataset": iter([1])}, "which has no length or cannot be indexed. Give a map-style dataset"),
        (
            {"optimizer": lambda p: torch.optim.SGD(OTHER.parameters(), lr=1)},
            "2 of the 2 parameters of SGD are not the model's",
        ),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss several times in a step"),
        ({"schedule": lambda o: 3}, r"Training\(schedule=…\) is a int; it must be a torch LRScheduler"),
        (
            {"schedule": lambda o: lr_scheduler.StepLR(torch.optim.SGD(OTHER.parameters(), lr=1), 1)},
            "belongs to another optimizer",
        ),
        ({"schedule_every": "day"}, "schedule_every is 'day'; it must be 'step', 'epoch' or 'evaluation'"),
        ({"schedule_every": "evaluation"}, "schedule_every='evaluation' needs evaluate=…, which is not given"),
        ({"schedule": lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau follows a metric. Set schedule_every="),
        ({"clip_norm": 0}, r"clip_norm is 0; it must be positive\. Leave it out not to clip"),
        ({"autocast": "int8"}, "autocast is 'int8'; it must be 'bf16' or 'fp16'"),
        ({"precision": "bf16"}, "precision is 'bf16'; it must be 'float32' or 'tf32'"),
        ({"best": "max accuracy"}, "best='max accuracy' needs evaluate=…, which is not given"),
        ({"stop": Stop(target_metric="a >= 1")}, "target_metric='a >= 1' needs evaluate=…"),
        ({"evaluate": len, "best": "accuracy"}, r"best 'accuracy' is no choice\. Write for example 'max accuracy'"),
        ({"evaluate_every": 0}, "evaluate_every is 0; it must be at least 1 epoch"),
        ({"state": {"ema": 3}}, r"state\['ema'\] is a int without state_dict\(\) and load_state_dict\(\)"),
        ({"shuffle": "yes"}, r"Training\(shuffle=…\) is a str; it must be True, False or a function"),
    ],
)
def test_mistakes_are_named(make_training: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_training(**changes)


def test_tensors_that_cannot_be_copied_in_place_are_named(make_training: Any) -> None:
    model = nn.Linear(6, 3)
    model.register_buffer("graph", torch.eye(6).to_sparse())
    with pytest.raises(InputError, match="buffer 'graph' of the model is sparse; states are copied as dense tensors"):
        make_training(model=model)
    with pytest.raises(InputError, match=r"parameter 'weight' of the model has no shape yet\. Pass one batch"):
        make_training(model=nn.LazyLinear(3))


def test_nothing_to_train(make_training: Any) -> None:
    frozen = nn.Linear(6, 3).requires_grad_(False)
    with pytest.raises(InputError, match="Adam holds no parameter that requires a gradient: nothing would be trained"):
        make_training(model=frozen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"Stop\(\) names no end\. Give one or more of epochs, steps, target_loss, target_metric"),
        ({"epochs": 0}, r"Stop\(epochs=0\); it must be a whole number of at least 1"),
        ({"steps": 1.5}, r"Stop\(steps=1\.5\); it must be a whole number"),
        ({"steps": 1, "window": 0}, r"Stop\(window=0\)"),
        ({"target_loss": float("nan")}, r"Stop\(target_loss=nan\); it must be a finite number"),
        ({"target_metric": "accuracy > 0.9"}, r"target_metric 'accuracy > 0\.9' is no condition\. Write for example"),
        ({"target_metric": "accuracy >= much"}, "is no condition"),
    ],
)
def test_ends_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stop(**arguments)


def test_the_latest_end() -> None:
    assert Stop(epochs=3).most_steps(10) == 30
    assert Stop(epochs=3, steps=12).most_steps(10) == 12
    assert Stop(target_loss=0.1).most_steps(10) is None


def test_goals_are_read() -> None:
    assert MetricGoal.parse(" top 1 >= 0.5") == MetricGoal("top 1", True, 0.5)
    assert MetricGoal.parse("loss<=1e-3") == MetricGoal("loss", False, 1e-3)
    assert Best.parse("min loss") == Best("loss", False)


def test_metrics_are_read() -> None:
    assert as_metrics(0.5) == {"metric": 0.5}
    assert as_metrics({"a": torch.tensor(2.0), "b": 1}) == {"a": 2.0, "b": 1.0}
    with pytest.raises(InputError, match=r"evaluate returned a Tensor of shape \(2,\) for 'a'\. Return one number"):
        as_metrics({"a": torch.zeros(2)})
    with pytest.raises(InputError, match="evaluate returned missing for 'metric'"):
        as_metrics(None)
