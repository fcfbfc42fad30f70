"""Synchronized BatchNorm (``sync_batchnorm = true``): all-gathers batch statistics over a step's ranks.

    behind a rank's contribution in its slot:  how many vectors it has shown | the last one | the one before it

Whoever shows its vector n + 1 has read all vectors n, so two places, taken by turns, are enough. A count is made of
formation, step and number within the step, so that what was left earlier is never taken for news, and a rank that had
no samples in some step is in time for the next one.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from carpool.core.errors import InputError
from carpool.jobs.program import Program
from carpool.runtime.compat.torch_api import BatchNorm, check_batch_norm_input
from carpool.runtime.engine.forward_backward import Step
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import TrainingError
from carpool.runtime.reduce.reducer import StepAborted
from carpool.runtime.reduce.shm_layout import ShmLayout, aligned

_COUNT_BYTES = aligned(8)
_STEP_BITS, _NUMBER_BITS = 28, 15  # of a count; the rest is the formation's
_LOOK_S = 5e-5  # between two looks whether the others are there
_LOOKS = 20  # after which it is also asked whether they will ever be
ALL_GATHER_TIMEOUT_S = 600.0  # a part may take that much longer than another


def all_gather_bytes(room: int) -> int:
    """What meetings over vectors of so many numbers take in a slot."""
    return _COUNT_BYTES + 2 * aligned(8 * room)


class ShmAllGather:
    """One rank's view of the meetings of a formation in default mode, where every rank has one slot."""

    def __init__(
        self, fd: int, slots: ShmLayout, rank: int, formation: int, room: int, is_given_up: Callable[[], bool]
    ) -> None:
        memory = mmap.mmap(fd, slots.num_bytes)
        starts = [slots.offset(0, slot + 1) - all_gather_bytes(room) for slot in range(slots.num_slots)]
        self._counts = [memoryview(memory)[start : start + 8].cast("q") for start in starts]
        offsets = [(start + _COUNT_BYTES, start + _COUNT_BYTES + aligned(8 * room)) for start in starts]
        self._places = [
            [torch.frombuffer(memory, dtype=torch.float64, count=room, offset=offset) for offset in by_turns]
            for by_turns in offsets
        ]
        self._rank = rank
        self._formation = formation
        self._shown = 0  # the count of the vector shown last
        self._is_given_up = is_given_up
        self._members: tuple[int, ...] = ()

    def attend(self, step: Step) -> None:
        """The next vectors belong to this step; only ranks that have samples in it show any."""
        self._shown = ((self._formation << _STEP_BITS) + step.number) << _NUMBER_BITS
        self._members = tuple(rank for rank, (start, end) in enumerate(step.bounds) if start < end)

    def show(self, vector: Tensor) -> Tensor:
        """The vectors of all members, a row each, in the order of their ranks; waits until all have shown theirs."""
        turn, size = self._shown % 2, vector.numel()
        self._places[self._rank][turn][:size] = vector
        self._shown += 1
        self._counts[self._rank][0] = self._shown
        for rank in self._members:
            if self._counts[rank][0] < self._shown:
                self._await(rank)
        return torch.stack([self._places[rank][turn][:size] for rank in self._members])

    def _await(self, rank: int) -> None:
        patient_until, looks = time.monotonic() + ALL_GATHER_TIMEOUT_S, 0
        while self._counts[rank][0] < self._shown:
            time.sleep(_LOOK_S)
            looks += 1
            if looks % _LOOKS:
                continue
            if self._is_given_up():
                raise StepAborted("told while waiting for the statistics of the others")
            if time.monotonic() > patient_until:
                raise TrainingError(
                    f"rank {rank} has not shown its statistics for {ALL_GATHER_TIMEOUT_S:.0f} s. With sync_batchnorm = true "
                    "every part of a step must pass the same BatchNorm layers in the same order; else set it to false."
                )


# Forward, each part shows the number n_p of its values per channel, their mean μ_p and the sum M_p of squared deviations
# from it, and all combine them alike (Chan, Golub and LeVeque, 1979):
#
#     N = Σ n_p,   μ = Σ n_p μ_p / N,   σ² = (Σ M_p + Σ n_p (μ_p − μ)²) / N
#
# Backward, with g the gradient of the step's loss by the layer's output and x̂ = (x − μ) / √(σ² + ε), each part shows
# Σ g and Σ g x̂ over its own values, and with the sums over all parts
#
#     ∂x = γ / √(σ² + ε) · (g − Σ g / N − x̂ · Σ g x̂ / N)
#
# Gradients of γ and β stay those of the part: they are added up with all others. Alone, layers are torch's own.


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorms:
    """The BatchNorm layers of a model, made to take their statistics over all parts of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.meeting: ShmAllGather | None = None  # None: there are no other parts
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}
        for name, layer in layers.items():
            if type(layer) not in _KINDS:
                raise InputError(
                    f"sync_batchnorm = true, but {name!r} is a {type(layer).__name__}: how it takes its statistics is "
                    "not known",
                    way_out="Use torch's BatchNorm1d, 2d or 3d, or set sync_batchnorm = false.",
                )
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]
        self.room = 1 + 2 * max(layer.num_features for layer in layers.values())  # numbers in the longest vector

    def __deepcopy__(self, memo: Any) -> SyncBatchNorms:
        """The same: a copy of the model, for a moving average say, is normalised as the model is."""
        return self

    def _forward(self, layer: BatchNorm, inputs: Tensor) -> Tensor:
        if self.meeting is None or not layer.training:
            normalised: Tensor = type(layer).forward(layer, inputs)
            return normalised
        check_batch_norm_input(layer, inputs)
        settings = (layer.weight, layer.bias, layer.eps, self.meeting)
        normalised, mean, variance, count = _Normalise.apply(inputs, *settings)  # type: ignore[no-untyped-call]
        if layer.track_running_stats:
            _remember(layer, mean, variance, float(count))
        return normalised


def sync_batch_norms(program: Program, training: Training) -> SyncBatchNorms | None:
    """Join the layers of a training where its program asks for it, and there are any."""
    return SyncBatchNorms(training.model) if program.sync_batchnorm and training.batch_norms else None


class _Normalise(torch.autograd.Function):
    """Forward and backward of the formulas above."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, meeting: ShmAllGather
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = inputs.float() if inputs.dtype in {torch.float16, torch.bfloat16} else inputs
        own_count = wide.numel() // wide.shape[1]
        variance, mean = torch.var_mean(wide, _over(wide), correction=0)
        own = torch.cat([mean.new_tensor([own_count]), mean, variance * own_count]).double().cpu()
        counts, means, squares = torch.split(meeting.show(own), [1, len(mean), len(mean)], dim=1)
        count = counts.sum()
        joint_mean = (counts * means).sum(0) / count
        joint_variance = (squares + counts * (means - joint_mean) ** 2).sum(0) / count
        mean, variance = joint_mean.to(wide), joint_variance.to(wide)
        made = torch.nn.functional.batch_norm(wide, mean, variance, weight, bias, eps=eps)
        context.save_for_backward(inputs, weight, mean, torch.rsqrt(variance + eps))
        context.meeting, context.count = meeting, float(count)
        context.mark_non_differentiable(mean, variance, count)
        return made.to(inputs.dtype), mean, variance, count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, scale = context.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        shape = [1, -1, *[1] * (inputs.ndim - 2)]
        normal = (inputs - mean.view(shape)) * scale.view(shape)
        own = gradient.sum(_over(inputs)), (gradient * normal).sum(_over(inputs))
        sums = context.meeting.show(torch.cat(own).double().cpu()).sum(0) / context.count
        shift, stretch = sums.to(gradient).chunk(2)
        by_inputs = gradient - shift.view(shape) - normal * stretch.view(shape)
        by_inputs *= (scale if weight is None else scale * weight).view(shape)
        has_weight = weight is not None
        by_weight, by_bias = (own[1], own[0]) if has_weight else (None, None)
        return by_inputs.to(inputs.dtype), by_weight, by_bias, None, None


def _over(inputs: Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [dimension for dimension in range(inputs.ndim) if dimension != 1]


@torch.no_grad()
def _remember(layer: BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Let the running statistics follow, as torch's own layers do it: the variance without bias."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    follow = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (count / max(count - 1.0, 1.0))
    layer.running_mean.mul_(1.0 - follow).add_(mean.to(layer.running_mean), alpha=follow)
    layer.running_var.mul_(1.0 - follow).add_(unbiased.to(layer.running_var), alpha=follow)
