"""Another batch and the learning rate that goes with it: schedules and saved states follow."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import carpool
from carpool.runtime.engine.adaptive_batch import apply_batch_size, scale_learning_rate
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.protocol import Proceed


def made(kind: str = "SGD", **options: object) -> carpool.Training:
    model = nn.Linear(64, 10)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    return carpool.Training(
        model=model,
        optimizer=optimizer,
        dataset=carpool.datasets.synthetic((64,), classes=10, size=256).train,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16,
        stop=carpool.Stop(steps=8),
        **options,  # type: ignore[arg-type]
    )


def rate(training: carpool.Training) -> float:
    return float(training.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("kind", "scaled"), [("SGD", 0.4), ("Adam", 0.2), ("AdamW", 0.2)])
def test_the_rate_grows_with_the_gain_or_its_root(kind: str, scaled: float) -> None:
    training = made(kind)
    scale_learning_rate(training, 4.0)
    assert rate(training) == pytest.approx(scaled)
    scale_learning_rate(training, 0.0)  # nobody knows: as before
    scale_learning_rate(training, 4.0)
    assert rate(training) == pytest.approx(scaled)
    scale_learning_rate(training, 1.0)
    assert rate(training) == pytest.approx(0.1)


def test_who_takes_a_state_over_has_its_gain_too() -> None:
    first, second = made(), made()
    scale_learning_rate(first, 4.0)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    scale_learning_rate(second, 2.0)
    assert rate(second) == pytest.approx(0.2)


def test_a_schedule_goes_on_from_there() -> None:
    training = made()
    optimizer = training.optimizer
    parts = [LambdaLR(optimizer, lambda step: 1.0 / (1 + step)), StepLR(optimizer, 1, gamma=0.5)]
    whole = SequentialLR(optimizer, parts, milestones=[2])
    object.__setattr__(training, "schedule", whole)
    scale_learning_rate(training, 4.0)
    rates = []
    for _ in range(3):
        optimizer.step()
        whole.step()
        rates.append(rate(training))
    assert rates[0] == pytest.approx(0.4 / 2)
    assert rates[1:] == pytest.approx([0.4, 0.2])


def test_a_formation_brings_batch_and_rate_and_the_own_ones_back() -> None:
    trainer = Trainer(made())
    trainer.step()
    apply_batch_size(trainer, Proceed(1, batch_size=64, lr_gain=2.0), 16, per_device=False)
    assert trainer.batch_size == 64
    assert rate(trainer.training) == pytest.approx(0.2)
    trainer.step()
    apply_batch_size(trainer, Proceed(2, lr_gain=0.0), 16, per_device=False)  # nothing is said of either
    assert trainer.batch_size == 64
    assert rate(trainer.training) == pytest.approx(0.2)
    apply_batch_size(trainer, Proceed(3, size=2), 16, per_device=True)
    assert trainer.batch_size == 32
    assert rate(trainer.training) == pytest.approx(0.1)
