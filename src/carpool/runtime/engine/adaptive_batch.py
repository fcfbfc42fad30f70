"""Adaptive batch size: measures gradient noise, changes the batch size and scales the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from carpool.predictors.loss.gradient_noise import NoiseScale

if TYPE_CHECKING:
    from carpool.runtime.engine.trainer import Trainer
    from carpool.runtime.engine.training import Training
    from carpool.runtime.process.protocol import Proceed


_TOGETHER = 4  # steps whose gradients are compared
_EVERY = 16  # steps from one comparison to the next: reading a gradient takes time, and on a GPU it waits for it


class GradientNoiseMeter:
    """Takes a few steps in a row for the parts of one large batch, as if the weights had not moved in between.

    They do move, so that gradients are a little less alike than they would be, and φ comes out a little high. Nothing
    of the training is changed: gradients are only read.
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
        """φ in samples; None before the first comparison, and where the noise drowns the gradient."""
        found = self._noise.predict().mean
        return found if isfinite(found) else None

    @torch.no_grad()
    def see(self, num_samples: int) -> None:
        """A step of so many samples has left its gradient on the parameters."""
        place = self._count % _EVERY
        self._count += 1
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if place >= _TOGETHER or not grads:
            return
        gradient = torch.cat([grad.flatten().float() for grad in grads])
        if place == 0 or self._sum is None or self._sum.shape != gradient.shape:
            self._sizes, self._norms, self._sum = [], [], torch.zeros_like(gradient)
        self._sizes.append(num_samples)
        self._norms.append(_squared(gradient))
        self._sum.add_(gradient, alpha=num_samples)
        if len(self._sizes) == _TOGETHER:
            self._noise.partial_fit(self._sizes, self._norms, _squared(self._sum / sum(self._sizes)))
            self._sum = None


def _squared(values: Tensor) -> float:
    return float(values.double().square().sum())


# With another batch a step counts for `gain` steps with the training's own (`gains.py`), if the learning rate grows by as
# much. For optimizers that divide by the size of the gradient, such as Adam, it grows by the square root (Malladi et al.,
# NeurIPS 2022). A schedule goes on from there: its base rates are scaled too.


_GAIN = "gain"  # kept with an optimizer's groups, as schedules keep their `initial_lr`, so that states have it


def apply_batch_size(trainer: Trainer, said: Proceed, own: int, *, per_device: bool) -> None:
    """Hold as many samples per step as a formation is told, and let its steps count for as much as it is told."""
    most = trainer.training.num_samples
    batch_size = said.batch_size or (min(own * said.size, most) if per_device else 0)
    if batch_size and batch_size != trainer.batch_size:
        trainer.resize_batch(batch_size)
    scale_learning_rate(trainer.training, said.lr_gain)


def scale_learning_rate(training: Training, gain: float) -> None:
    """Let a step count for `gain` steps with the training's own batch, until the next call; 0: as before."""
    optimizer, schedule = training.optimizer, training.schedule
    factors = [gain / group.get(_GAIN, 1.0) for group in optimizer.param_groups]
    if not gain or all(factor == 1.0 for factor in factors):
        return
    if not isinstance(optimizer, torch.optim.SGD):
        factors = [sqrt(factor) for factor in factors]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group[_GAIN] = gain
        _multiply(group, "lr", factor)
        _multiply(group, "initial_lr", factor)
    for part in _schedules(schedule):
        if len(rates := getattr(part, "base_lrs", [])) == len(factors):
            part.base_lrs = [rate * factor for rate, factor in zip(rates, factors, strict=True)]


def _schedules(schedule: Any) -> Iterator[Any]:
    """A schedule, and those it is made of."""
    if schedule is not None:
        yield schedule
        for part in getattr(schedule, "_schedulers", ()):
            yield from _schedules(part)


def _multiply(group: dict[str, Any], name: str, factor: float) -> None:
    """In place where it is a tensor: recordings read it there."""
    value = group.get(name)
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.mul_(factor)
    elif value is not None:
        group[name] = value * factor
