"""Reference training loop: ordinary PyTorch with the same seeding and batch split.

It shares with the runtime only its inputs (data order, seeds, optimizer form), and no code that computes, adds or
applies gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from carpool.runtime.data.batches import AugmentRandom, to_device
from carpool.runtime.data.sampler import StepSampler
from carpool.runtime.data.tensor_rows import makes_batches
from carpool.runtime.engine.determinism import (
    enable_determinism,
    intra_op_threads,
    seed_augment,
    seed_batch,
    seed_evaluation,
    seed_pass,
    seed_sample,
    seed_update,
)
from carpool.runtime.engine.device_setup import place_training
from carpool.runtime.engine.optimizer_set import optimizers_of
from carpool.runtime.engine.stop_criteria import Best
from carpool.runtime.engine.training import Training, as_metrics
from carpool.runtime.reduce.shards import split_micro_batches
from carpool.runtime.state.digest import digest


@dataclass(frozen=True, slots=True)
class PlainRun:
    """The result of a plain loop."""

    digest: str
    losses: list[float]
    metrics: dict[str, float]


def plain_loop(
    training: Training,
    *,
    shards: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    max_steps: int | None = None,
) -> PlainRun:
    """Train to the end (or for ``max_steps``) in one process; exact mode with this many shards must give equal bits."""
    enable_determinism()
    where = torch.device(device)
    place_training(training, where)
    with intra_op_threads(1 if shards is not None and where.type == "cpu" else None):
        return _run(training, shards or 1, seed, where, max_steps)


def _run(training: Training, shards: int, seed: int, device: torch.device, max_steps: int | None) -> PlainRun:
    order = StepSampler(training.num_samples, seed, training.shuffle)
    steps = _Steps(training, shards, seed, device)
    losses: list[float] = []
    metrics: dict[str, float] = {}
    evaluated: list[float] = []  # by the metric in `best`
    epoch, reason = 0, ""
    while not reason:
        samples = list(_stream(training, seed, epoch)) if training.is_stream else order.samples(epoch)
        for start in range(0, len(samples), training.batch_size):
            batch = samples[start : start + training.batch_size]
            ends_epoch = start + training.batch_size >= len(samples)
            losses.append(steps.make(batch, len(losses), epoch, ends_epoch=ends_epoch))
            epochs_done = epoch + ends_epoch
            reason = training.stop.by_progress(len(losses), epochs_done, losses)
            due = ends_epoch and epochs_done % training.evaluate_every == 0
            if training.evaluate is not None and (due or reason):
                metrics = _evaluate(training, seed, len(losses))
                _schedule(training, metrics)
                reason = reason or training.stop.by_metrics(metrics) or _patience(training, metrics, evaluated)
            if len(losses) == max_steps:
                reason = "enough"
            if reason:
                break
        epoch += 1
    return PlainRun(digest(training.model), losses, metrics)


class _Steps:
    def __init__(self, training: Training, shards: int, seed: int, device: torch.device) -> None:
        self._training = training
        self._shards = shards
        self._seed = seed
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type, enabled=training.autocast_dtype is torch.float16)

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        groups = [group for each in optimizers_of(self._training.optimizer) for group in each.param_groups]
        held = {p for group in groups for p in group["params"]}
        return [p for p in self._training.model.parameters() if p in held and p.requires_grad]

    def make(self, samples: Any, step: int, epoch: int, *, ends_epoch: bool) -> float:
        if self._training.step is not None:
            return self._custom(samples, step, epoch, ends_epoch=ends_epoch)
        total = self._passes(samples, step, epoch)
        loss = float(total.loss) if total.count is None else float(total.loss) / float(total.count)
        for parameter, gradient, used in zip(self._parameters, total.gradients, total.used, strict=True):
            gradient = gradient if total.count is None else gradient / total.count
            parameter.grad = gradient.to(parameter.dtype) if used else None
        if self._update(step):
            self._follow_up(step, ends_epoch=ends_epoch)
        return loss

    def _custom(self, samples: Any, step: int, epoch: int, *, ends_epoch: bool) -> float:
        training = self._training
        assert training.step is not None
        batch = _batch(training, samples, self._seed, epoch, self._device)
        seed_pass(self._seed, step, 0)
        result = training.step(training.model, batch, training.optimizer)
        self._follow_up(step, ends_epoch=ends_epoch)
        loss = result[0] if isinstance(result, tuple) else result
        return float(loss.detach() if isinstance(loss, Tensor) else loss)

    def _passes(self, samples: Any, step: int, epoch: int) -> _Made:
        """Run all shards, each from the buffers at the start of the step; leaves the model with the buffers' sum."""
        model, num_samples = self._training.model, len(samples)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        made: list[_Made | None] = []
        for shard in range(self._shards):
            mine = samples[shard * num_samples // self._shards : (shard + 1) * num_samples // self._shards]
            if len(mine) == 0:
                made.append(None)
                continue
            shard_sum: _Made | None = None
            for number, (start, end) in enumerate(split_micro_batches(0, len(mine), self._training.micro_batch)):
                batch = _batch(self._training, mine[start:end], self._seed, epoch, self._device)
                _put_buffers(model, before)
                seed_pass(self._seed, step, shard, number)
                part = end - start, num_samples
                one = _shard(self._training, batch, part, self._parameters, before, self._scaler)
                shard_sum = one if shard_sum is None else _added(shard_sum, one)
            made.append(shard_sum)
        total = _tree(made)
        assert total is not None
        _put_buffers(model, before | {name: total.buffers[name] for name in total.changed})
        return total

    def _update(self, step: int) -> bool:
        """Apply the gradients. Returns whether they were finite."""
        training, scaler = self._training, self._scaler
        scale = scaler.get_scale()
        optimizers = optimizers_of(training.optimizer)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, training.clip_norm)
        if self._shards > 1:
            seed_update(self._seed, step)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        training.model.zero_grad()
        return scaler.get_scale() >= scale

    def _follow_up(self, step: int, *, ends_epoch: bool) -> None:
        training, every = self._training, self._training.schedule_every
        for schedule in training.schedules if every == "step" or (every == "epoch" and ends_epoch) else ():
            schedule.step()
        if training.after_update is not None:
            training.after_update(training.model, step + 1)


def _put_buffers(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def _schedule(training: Training, metrics: dict[str, float]) -> None:
    """Step a scheduler that goes by evaluations."""
    for schedule in training.schedules if training.schedule_every == "evaluation" else ():
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(metrics[Best.parse(training.best).metric])
        else:
            schedule.step()


def _patience(training: Training, metrics: dict[str, float], evaluated: list[float]) -> str:
    """Why training ends without an improvement; empty if it goes on."""
    if training.stop.patience is None:
        return ""
    best = Best.parse(training.best)
    evaluated.append(metrics[best.metric] if best.larger else -metrics[best.metric])
    return training.stop.by_patience(len(evaluated) - 1 - evaluated.index(max(evaluated)))


@dataclass(slots=True)
class _Made:
    gradients: list[Tensor]
    used: list[bool]
    buffers: dict[str, Tensor]
    changed: set[str]
    loss: Tensor
    count: Tensor | None


def _shard(
    training: Training,
    batch: Any,
    part: tuple[int, int],  # its samples, and those of the step
    parameters: list[torch.nn.Parameter],
    before: dict[str, Tensor],
    scaler: torch.amp.GradScaler,
) -> _Made:
    model, dtype = training.model, training.autocast_dtype
    num_samples, of = part
    model.zero_grad()
    with torch.autocast(next(model.parameters()).device.type, dtype=dtype, enabled=dtype is not None):
        assert training.loss is not None
        result = training.loss(model, batch)
        count = None
        if isinstance(result, tuple) and isinstance(result[-1], dict):  # metrics
            result = result[0] if len(result) == 2 else result[:2]
        if isinstance(result, tuple):
            loss, number = result
            if num_samples == of:
                loss = loss / number
            else:
                loss = loss / of
                count = torch.as_tensor(number / of, dtype=_sum_type(model), device=loss.device)
        else:
            loss = result if num_samples == of else result * (num_samples / of)
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    share, wide = num_samples / of, _sum_type(model)
    buffers, changed = {}, set()
    for name, buffer in model.named_buffers():
        if not _is_same(buffer, before[name]):
            changed.add(name)
        averaged = _is_averaged(buffer)
        buffers[name] = buffer.to(torch.promote_types(wide, buffer.dtype)) * share if averaged else buffer.clone()
    return _Made(
        gradients=[
            (torch.zeros_like(p) if p.grad is None else p.grad).to(torch.promote_types(wide, p.dtype), copy=True)
            for p in parameters
        ],
        used=[p.grad is not None for p in parameters],
        buffers=buffers,
        changed=changed,
        loss=loss.detach().to(wide),
        count=count,
    )


def _is_same(buffer: Tensor, old: Tensor) -> bool:
    """Whether two buffers are equal; NaN, which a mask may hold, equals NaN."""
    return bool(((buffer == old) | ((buffer != buffer) & (old != old))).all())


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _sum_type(model: torch.nn.Module) -> torch.dtype:
    tensors = (*model.parameters(), *model.buffers())
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _tree(made: list[_Made | None]) -> _Made | None:
    """The sum in the fixed binary tree."""
    if len(made) == 1:
        return made[0]
    left, right = _tree(made[: len(made) // 2]), _tree(made[len(made) // 2 :])
    if left is None or right is None:
        return left or right
    return _added(left, right)


def _added(left: _Made, right: _Made) -> _Made:
    return _Made(
        gradients=[a + b for a, b in zip(left.gradients, right.gradients, strict=True)],
        used=[a or b for a, b in zip(left.used, right.used, strict=True)],
        buffers={n: a + right.buffers[n] if _is_averaged(a) else a for n, a in left.buffers.items()},
        changed=left.changed | right.changed,
        loss=left.loss + right.loss,
        count=None if left.count is None or right.count is None else left.count + right.count,
    )


def _batch(training: Training, samples: Any, seed: int, epoch: int, device: torch.device) -> Any:
    data = training.dataset
    if training.is_stream:
        first = samples[0][0]
        seed_batch(seed, epoch, first)
        batch = (training.collate or torch.utils.data.default_collate)([row for _, row in samples])
        samples = np.array([position for position, _ in samples])
    elif makes_batches(data):
        seed_batch(seed, epoch, int(samples[0]))
        batch = data.batch(torch.as_tensor(samples))
    else:
        rows = list(_read(data, samples, seed, epoch))
        seed_batch(seed, epoch, int(samples[0]))
        batch = (training.collate or torch.utils.data.default_collate)(rows)
    if training.augment is not None:
        seed_augment(seed, epoch, int(samples[0]))
        batch = training.augment(batch, AugmentRandom(seed, epoch, samples))
    return to_device(batch, device)


def _read(data: Any, samples: Any, seed: int, epoch: int) -> Iterator[Any]:
    for sample in samples:
        seed_sample(seed, epoch, int(sample))
        yield data[int(sample)]


def _stream(training: Training, seed: int, epoch: int) -> Iterator[tuple[int, Any]]:
    """The samples of an epoch with their positions."""
    if hasattr(training.dataset, "set_epoch"):
        training.dataset.set_epoch(epoch)
    seed_sample(seed, epoch, 0)
    stream, position = iter(training.dataset), 0
    while True:
        seed_sample(seed, epoch, position)
        try:
            yield position, next(stream)
        except StopIteration:
            return
        position += 1


def _evaluate(training: Training, seed: int, step: int) -> dict[str, float]:
    assert training.evaluate is not None
    modes = {module: module.training for module in training.model.modules()}
    seed_evaluation(seed, step)
    training.model.eval()
    with torch.no_grad():
        metrics = as_metrics(training.evaluate(training.model))
    for module, mode in modes.items():
        module.training = mode
    return metrics
