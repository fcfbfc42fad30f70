"""Adaptive batch size: measures gradient noise, changes the batch size and scales the learning rate.

A step with another batch size makes the progress of `gain` steps with the training's own if the learning rate is
multiplied by `gain`, for adaptive optimizers such as Adam by its square root (Malladi et al., NeurIPS 2022). The base
rates of a schedule are multiplied too; the schedule still advances by one per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from carpool.predictors.loss.gradient_noise import NoiseScale
from carpool.runtime.compat.torch_api import nested_schedules
from carpool.runtime.engine.optimizer_set import optimizers_of

if TYPE_CHECKING:
    from carpool.runtime.engine.trainer import Trainer
    from carpool.runtime.engine.training import Training
    from carpool.runtime.process.protocol import Proceed

_WINDOW = 4  # steps whose gradients are compared
_EVERY = 16  # steps from one comparison to the next: reading a gradient synchronizes with the GPU
_GAIN = "gain"  # stored in the optimizer's groups, as schedules store `initial_lr`, so that it is checkpointed


class GradientNoiseMeter:
    """Estimates the gradient noise scale φ, treating a few successive steps as parts of one large batch.

    The weights move between these steps, so φ comes out slightly too high. Gradients are only read.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._noise = NoiseScale()
        self._count = 0
        self._sizes: list[int] = []
        self._norms: list[float] = []
        self._sum: Tensor | None = None

    @property
    def scale(self) -> float | None:
        """φ in samples; None before the first comparison, or if noise exceeds the gradient."""
        found = self._noise.predict().mean
        return found if isfinite(found) else None

    @torch.no_grad()
    def observe(self, num_samples: int) -> None:
        position = self._count % _EVERY
        self._count += 1
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if position >= _WINDOW or not grads:
            return
        gradient = torch.cat([grad.flatten().float() for grad in grads])
        if position == 0 or self._sum is None or self._sum.shape != gradient.shape:
            self._sizes, self._norms, self._sum = [], [], torch.zeros_like(gradient)
        self._sizes.append(num_samples)
        self._norms.append(_squared_norm(gradient))
        self._sum.add_(gradient, alpha=num_samples)
        if len(self._sizes) == _WINDOW:
            self._noise.partial_fit(self._sizes, self._norms, _squared_norm(self._sum / sum(self._sizes)))
            self._sum = None


def _squared_norm(values: Tensor) -> float:
    return float(values.double().square().sum())


def apply_batch_size(trainer: Trainer, proceed: Proceed, own: int, *, per_device: bool) -> None:
    """Set the batch size and learning-rate gain that the executor ordered; ``own`` is the training's batch size."""
    most = trainer.training.num_samples or own * proceed.size  # a stream has no length
    batch_size = proceed.batch_size or (min(own * proceed.size, most) if per_device else 0)
    if batch_size and batch_size != trainer.batch_size:
        trainer.resize_batch(batch_size)
    scale_learning_rate(trainer.training, proceed.lr_gain)


def scale_learning_rate(training: Training, gain: float) -> None:
    """Make a step count for `gain` steps with the training's own batch; 0 changes nothing."""
    for optimizer in optimizers_of(training.optimizer):
        schedules = [schedule for schedule in training.schedules if schedule.optimizer is optimizer]
        _scale_learning_rate(optimizer, schedules, gain)


def _scale_learning_rate(optimizer: torch.optim.Optimizer, schedules: Sequence[Any], gain: float) -> None:
    factors = [gain / group.get(_GAIN, 1.0) for group in optimizer.param_groups]
    if not gain or all(factor == 1.0 for factor in factors):
        return
    if not isinstance(optimizer, torch.optim.SGD):
        factors = [sqrt(factor) for factor in factors]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group[_GAIN] = gain
        _multiply(group, "lr", factor)
        _multiply(group, "initial_lr", factor)
    for part in [part for schedule in schedules for part in _schedules(schedule)]:
        if len(rates := getattr(part, "base_lrs", [])) == len(factors):
            part.base_lrs = [rate * factor for rate, factor in zip(rates, factors, strict=True)]


def _schedules(schedule: Any) -> Iterator[Any]:
    yield schedule
    for part in nested_schedules(schedule):
        yield from _schedules(part)


def _multiply(group: dict[str, Any], name: str, factor: float) -> None:
    value = group.get(name)
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.mul_(factor)  # in place: captured graphs read it there
    elif value is not None:
        group[name] = value * factor
