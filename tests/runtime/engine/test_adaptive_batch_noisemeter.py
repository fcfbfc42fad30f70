"""Gradient noise from a training's own steps."""

import pytest
import torch
from torch import nn

from carpool.runtime.engine.adaptive_batch import GradientNoiseMeter


def feed(
    meter: GradientNoiseMeter, parameter: nn.Parameter, batch: int, steps: int, *, noise: float, seed: int = 0
) -> None:
    """Gradients of mean 1 in 200 dimensions, each sample with so much noise: φ = noise²."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        parameter.grad = torch.ones(200) + noise / batch**0.5 * torch.randn(200, generator=generator)
        meter.see(batch)


@pytest.mark.parametrize("noise", [2.0, 10.0])
def test_steps_in_a_row_tell_the_noise(noise: float) -> None:
    parameter = nn.Parameter(torch.zeros(200))
    meter = GradientNoiseMeter([parameter])
    feed(meter, parameter, 32, 1600, noise=noise)
    assert meter.scale == pytest.approx(noise**2, rel=0.15)


def test_another_batch_shows_the_same_noise() -> None:
    parameter = nn.Parameter(torch.zeros(200))
    meter = GradientNoiseMeter([parameter])
    feed(meter, parameter, 16, 800, noise=5.0)
    feed(meter, parameter, 64, 800, noise=5.0, seed=1)
    assert meter.scale == pytest.approx(25.0, rel=0.15)


def test_nothing_is_told_before_there_is_something_and_gradients_stay() -> None:
    parameter, idle = nn.Parameter(torch.zeros(200)), nn.Parameter(torch.zeros(3))
    meter = GradientNoiseMeter([parameter, idle])
    meter.see(8)  # no gradient at all
    assert meter.scale is None
    feed(meter, parameter, 8, 1, noise=1.0)
    before = parameter.grad.clone() if parameter.grad is not None else None
    meter.see(8)
    assert before is not None
    assert torch.equal(before, parameter.grad)  # type: ignore[arg-type]
    assert idle.grad is None
