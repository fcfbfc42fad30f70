"""Batch size, learning rate and gradient noise: schedules and saved states follow a change."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import carpool
from carpool.runtime.engine.adaptive_batch import GradientNoiseMeter, apply_batch_size, scale_learning_rate
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
    return float(training.whole_optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("kind", "scaled"), [("SGD", 0.4), ("Adam", 0.2), ("AdamW", 0.2)])
def test_the_rate_grows_with_the_gain_or_its_square_root(kind: str, scaled: float) -> None:
    training = made(kind)
    scale_learning_rate(training, 4.0)
    assert rate(training) == pytest.approx(scaled)
    scale_learning_rate(training, 0.0)  # unknown: unchanged
    scale_learning_rate(training, 4.0)
    assert rate(training) == pytest.approx(scaled)
    scale_learning_rate(training, 1.0)
    assert rate(training) == pytest.approx(0.1)


def test_a_loaded_state_keeps_its_gain() -> None:
    first, second = made(), made()
    scale_learning_rate(first, 4.0)
    second.whole_optimizer.load_state_dict(copy.deepcopy(first.whole_optimizer.state_dict()))
    scale_learning_rate(second, 2.0)
    assert rate(second) == pytest.approx(0.2)


def test_a_schedule_continues_from_the_scaled_rate() -> None:
    training = made()
    optimizer = training.whole_optimizer
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


def test_a_process_group_sets_batch_size_and_rate() -> None:
    trainer = Trainer(made())
    trainer.step()
    apply_batch_size(trainer, Proceed(1, batch_size=64, lr_gain=2.0), 16, per_device=False)
    assert trainer.batch_size == 64
    assert rate(trainer.training) == pytest.approx(0.2)
    trainer.step()
    apply_batch_size(trainer, Proceed(2, lr_gain=0.0), 16, per_device=False)  # neither is set
    assert trainer.batch_size == 64
    assert rate(trainer.training) == pytest.approx(0.2)
    apply_batch_size(trainer, Proceed(3, size=2), 16, per_device=True)
    assert trainer.batch_size == 32
    assert rate(trainer.training) == pytest.approx(0.1)


def feed(
    meter: GradientNoiseMeter, parameter: nn.Parameter, batch: int, steps: int, *, noise: float, seed: int = 0
) -> None:
    """Gradients of mean 1 in 200 dimensions, with this noise per sample: φ = noise²."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        parameter.grad = torch.ones(200) + noise / batch**0.5 * torch.randn(200, generator=generator)
        meter.observe(batch)


@pytest.mark.parametrize("noise", [2.0, 10.0])
def test_the_noise_scale_is_measured(noise: float) -> None:
    parameter = nn.Parameter(torch.zeros(200))
    meter = GradientNoiseMeter([parameter])
    feed(meter, parameter, 32, 1600, noise=noise)
    assert meter.scale == pytest.approx(noise**2, rel=0.15)


def test_the_noise_scale_does_not_depend_on_the_batch_size() -> None:
    parameter = nn.Parameter(torch.zeros(200))
    meter = GradientNoiseMeter([parameter])
    feed(meter, parameter, 16, 800, noise=5.0)
    feed(meter, parameter, 64, 800, noise=5.0, seed=1)
    assert meter.scale == pytest.approx(25.0, rel=0.15)


def test_no_scale_before_the_first_comparison_and_gradients_are_unchanged() -> None:
    parameter, idle = nn.Parameter(torch.zeros(200)), nn.Parameter(torch.zeros(3))
    meter = GradientNoiseMeter([parameter, idle])
    meter.observe(8)  # no gradient at all
    assert meter.scale is None
    feed(meter, parameter, 8, 1, noise=1.0)
    before = parameter.grad.clone() if parameter.grad is not None else None
    meter.observe(8)
    assert before is not None
    assert torch.equal(before, parameter.grad)  # type: ignore[arg-type]
    assert idle.grad is None
