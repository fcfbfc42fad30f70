"""Changing the batch size of a training that runs, and its learning rate with it.

With another batch a step counts for `gain` steps with the training's own (`gains.py`), if the learning rate grows by as
much. For optimizers that divide by the size of the gradient, such as Adam, it grows by the square root (Malladi et al.,
NeurIPS 2022). A schedule goes on from there: its base rates are scaled too.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from carpool.runtime.protocol import Proceed
    from carpool.runtime.trainer import Trainer
    from carpool.runtime.training import Training

_GAIN = "gain"  # kept with an optimizer's groups, as schedules keep their `initial_lr`, so that states have it


def take_batch(trainer: Trainer, said: Proceed, own: int, *, per_device: bool) -> None:
    """Hold as many samples per step as a formation is told, and let its steps count for as much as it is told."""
    most = trainer.training.num_samples
    batch_size = said.batch_size or (min(own * said.size, most) if per_device else 0)
    if batch_size and batch_size != trainer.batch_size:
        trainer.resize_batch(batch_size)
    scale_learning_rate(trainer.training, said.gain)


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
