"""Synchronized BatchNorm (``sync_batchnorm = true``): all-gathers batch statistics over a step's ranks.

Forward, each rank shares the number n_p of its values per channel, their mean μ_p and the sum M_p of squared deviations
from it, and all combine them alike (Chan, Golub and LeVeque, 1979):

    N = Σ n_p,   μ = Σ n_p μ_p / N,   σ² = (Σ M_p + Σ n_p (μ_p − μ)²) / N

Backward, with g the gradient of the step's loss by the layer's output and x̂ = (x − μ) / √(σ² + ε), each rank shares
Σ g and Σ g x̂ over its own values, and with the sums over all ranks

    ∂x = γ / √(σ² + ε) · (g − Σ g / N − x̂ · Σ g x̂ / N)

Gradients of γ and β stay local: they are summed with all others. With one rank, layers are torch's own.
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
_STEP_BITS, _NUMBER_BITS = 28, 15  # of a count; the rest is the epoch's
_POLL_S = 5e-5
_POLLS_PER_CHECK = 20  # polls between checks for an abort
ALL_GATHER_TIMEOUT_S = 600.0  # one rank's pass may take this much longer than another's
_SUPPORTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def all_gather_bytes(vector_size: int) -> int:
    """The bytes of a slot that all-gathers of vectors of this size need."""
    return _COUNT_BYTES + 2 * aligned(8 * vector_size)


class ShmAllGather:
    """All-gather of short vectors among the ranks of a process group; default mode, one slot per rank.

    After a rank's contribution its slot holds a count of vectors written and the last two vectors. A rank writes vector
    n + 1 after reading all vectors n, so two places are enough. Counts combine epoch, step and number within the step,
    so that old vectors are never taken for new ones, and a rank without samples in one step is in time for the next.
    """

    def __init__(
        self, fd: int, layout: ShmLayout, rank: int, epoch: int, vector_size: int, is_aborted: Callable[[], bool]
    ) -> None:
        memory = mmap.mmap(fd, layout.num_bytes)
        starts = [layout.offset(0, slot + 1) - all_gather_bytes(vector_size) for slot in range(layout.num_slots)]
        self._counts = [memoryview(memory)[start : start + 8].cast("q") for start in starts]
        offsets = [(start + _COUNT_BYTES, start + _COUNT_BYTES + aligned(8 * vector_size)) for start in starts]
        self._vectors = [
            [torch.frombuffer(memory, dtype=torch.float64, count=vector_size, offset=offset) for offset in pair]
            for pair in offsets
        ]
        self._rank = rank
        self._epoch = epoch
        self._count = 0
        self._is_aborted = is_aborted
        self._members: tuple[int, ...] = ()

    def begin_step(self, step: Step) -> None:
        """Start the vectors of a step; only ranks with samples in it take part."""
        self._count = ((self._epoch << _STEP_BITS) + step.number) << _NUMBER_BITS
        self._members = tuple(rank for rank, (start, end) in enumerate(step.bounds) if start < end)

    def gather(self, vector: Tensor) -> Tensor:
        """Write this rank's vector, wait for the others, and return all as rows in rank order."""
        place, size = self._count % 2, vector.numel()
        self._vectors[self._rank][place][:size] = vector
        self._count += 1
        self._counts[self._rank][0] = self._count
        for rank in self._members:
            if self._counts[rank][0] < self._count:
                self._await(rank)
        return torch.stack([self._vectors[rank][place][:size] for rank in self._members])

    def _await(self, rank: int) -> None:
        deadline, polls = time.monotonic() + ALL_GATHER_TIMEOUT_S, 0
        while self._counts[rank][0] < self._count:
            time.sleep(_POLL_S)
            polls += 1
            if polls % _POLLS_PER_CHECK:
                continue
            if self._is_aborted():
                raise StepAborted("the step was aborted while waiting for BatchNorm statistics")
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"sync_batchnorm: no statistics from rank {rank} for {ALL_GATHER_TIMEOUT_S:.0f} s. Every device "
                    "must run the same BatchNorm layers in the same order; else set sync_batchnorm = false."
                )


class SyncBatchNorms:
    """Patches the BatchNorm layers of a model to use statistics over all ranks of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.all_gather: ShmAllGather | None = None  # None: this is the only rank
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}
        for name, layer in layers.items():
            if type(layer) not in _SUPPORTED:
                raise InputError(
                    f"sync_batchnorm = true does not support {name!r}, a {type(layer).__name__}",
                    way_out="Use torch's BatchNorm1d, 2d or 3d, or set sync_batchnorm = false.",
                )
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]
        self.vector_size = 1 + 2 * max(layer.num_features for layer in layers.values())  # of the longest vector

    def __deepcopy__(self, memo: Any) -> SyncBatchNorms:
        """Share this object with copies of the model, for example for a moving average."""
        return self

    def _forward(self, layer: BatchNorm, inputs: Tensor) -> Tensor:
        if self.all_gather is None or not layer.training:
            normalized: Tensor = type(layer).forward(layer, inputs)
            return normalized
        check_batch_norm_input(layer, inputs)
        settings = (layer.weight, layer.bias, layer.eps, self.all_gather)
        normalized, mean, variance, count = _Normalize.apply(inputs, *settings)  # type: ignore[no-untyped-call]
        if layer.track_running_stats:
            _update_running_stats(layer, mean, variance, float(count))
        return normalized


def sync_batch_norms(program: Program, training: Training) -> SyncBatchNorms | None:
    """Patch the BatchNorm layers of a training if its job sets ``sync_batchnorm`` and it has any."""
    return SyncBatchNorms(training.model) if program.sync_batchnorm and training.batch_norms else None


class _Normalize(torch.autograd.Function):
    """Forward and backward of the formulas in the module's docstring."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, all_gather: ShmAllGather
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = inputs.float() if inputs.dtype in {torch.float16, torch.bfloat16} else inputs
        own_count = wide.numel() // wide.shape[1]
        variance, mean = torch.var_mean(wide, _all_but_channels(wide), correction=0)
        own = torch.cat([mean.new_tensor([own_count]), mean, variance * own_count]).double().cpu()
        counts, means, squares = torch.split(all_gather.gather(own), [1, len(mean), len(mean)], dim=1)
        count = counts.sum()
        joint_mean = (counts * means).sum(0) / count
        joint_variance = (squares + counts * (means - joint_mean) ** 2).sum(0) / count
        mean, variance = joint_mean.to(wide), joint_variance.to(wide)
        normalized = torch.nn.functional.batch_norm(wide, mean, variance, weight, bias, eps=eps)
        context.save_for_backward(inputs, weight, mean, torch.rsqrt(variance + eps))
        context.all_gather, context.count = all_gather, float(count)
        context.mark_non_differentiable(mean, variance, count)
        return normalized.to(inputs.dtype), mean, variance, count

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, scale = context.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        shape = [1, -1, *[1] * (inputs.ndim - 2)]
        normalized = (inputs - mean.view(shape)) * scale.view(shape)
        own = gradient.sum(_all_but_channels(inputs)), (gradient * normalized).sum(_all_but_channels(inputs))
        sums = context.all_gather.gather(torch.cat(own).double().cpu()).sum(0) / context.count
        mean_g, mean_gx = sums.to(gradient).chunk(2)
        grad_inputs = gradient - mean_g.view(shape) - normalized * mean_gx.view(shape)
        grad_inputs *= (scale if weight is None else scale * weight).view(shape)
        grad_weight, grad_bias = (None, None) if weight is None else (own[1], own[0])
        return grad_inputs.to(inputs.dtype), grad_weight, grad_bias, None, None


def _all_but_channels(inputs: Tensor) -> list[int]:
    return [dimension for dimension in range(inputs.ndim) if dimension != 1]


@torch.no_grad()
def _update_running_stats(layer: BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Update the running statistics as torch's layers do, with the unbiased variance."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (count / max(count - 1.0, 1.0))
    layer.running_mean.mul_(1.0 - momentum).add_(mean.to(layer.running_mean), alpha=momentum)
    layer.running_var.mul_(1.0 - momentum).add_(unbiased.to(layer.running_var), alpha=momentum)
