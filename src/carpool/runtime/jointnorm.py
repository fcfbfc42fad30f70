"""BatchNorm over all parts of a step (``sync_batchnorm = true``), so that how a batch is cut does not matter to it.

Forward, each part shows the number n_p of its values per channel, their mean μ_p and the sum M_p of squared deviations
from it, and all combine them alike (Chan, Golub and LeVeque, 1979):

    N = Σ n_p,   μ = Σ n_p μ_p / N,   σ² = (Σ M_p + Σ n_p (μ_p − μ)²) / N

Backward, with g the gradient of the step's loss by the layer's output and x̂ = (x − μ) / √(σ² + ε), each part shows
Σ g and Σ g x̂ over its own values, and with the sums over all parts

    ∂x = γ / √(σ² + ε) · (g − Σ g / N − x̂ · Σ g x̂ / N)

Gradients of γ and β stay those of the part: they are added up with all others. Alone, layers are torch's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from carpool.core.errors import InputError
from carpool.runtime.meeting import Meeting
from carpool.runtime.program import Program
from carpool.runtime.training import Training

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class JointNorms:
    """The BatchNorm layers of a model, made to take their statistics over all parts of a step."""

    def __init__(self, model: nn.Module) -> None:
        self.meeting: Meeting | None = None  # None: there are no other parts
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
        for name, layer in layers.items():
            if type(layer) not in _KINDS:
                raise InputError(
                    f"sync_batchnorm = true, but {name!r} is a {type(layer).__name__}: how it takes its statistics is "
                    "not known",
                    way_out="Use torch's BatchNorm1d, 2d or 3d, or set sync_batchnorm = false.",
                )
            layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]
        self.room = 1 + 2 * max(layer.num_features for layer in layers.values())  # numbers in the longest vector

    def __deepcopy__(self, memo: Any) -> JointNorms:
        """The same: a copy of the model, for a moving average say, is normalised as the model is."""
        return self

    def _forward(self, layer: _BatchNorm, inputs: Tensor) -> Tensor:
        if self.meeting is None or not layer.training:
            normalised: Tensor = type(layer).forward(layer, inputs)
            return normalised
        layer._check_input_dim(inputs)  # type: ignore[no-untyped-call]
        settings = (layer.weight, layer.bias, layer.eps, self.meeting)
        normalised, mean, variance, count = _Normalise.apply(inputs, *settings)  # type: ignore[no-untyped-call]
        if layer.track_running_stats:
            _remember(layer, mean, variance, float(count))
        return normalised


def joint_norms(program: Program, training: Training) -> JointNorms | None:
    """Join the layers of a training where its program asks for it, and there are any."""
    return JointNorms(training.model) if program.sync_batchnorm and training.batch_norms else None


class _Normalise(torch.autograd.Function):
    """Forward and backward of the formulas above."""

    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, meeting: Meeting
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
def _remember(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: float) -> None:
    """Let the running statistics follow, as torch's own layers do it: the variance without bias."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    follow = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (count / max(count - 1.0, 1.0))
    layer.running_mean.mul_(1.0 - follow).add_(mean.to(layer.running_mean), alpha=follow)
    layer.running_var.mul_(1.0 - follow).add_(unbiased.to(layer.running_var), alpha=follow)
