"""Device setup of a training: placement, memory format and float32 matmul precision."""

from __future__ import annotations

import torch
from torch import nn

from carpool.runtime.compat.torch_api import own_buffers
from carpool.runtime.engine.optimizer_step import normalize_optimizer
from carpool.runtime.engine.training import Training


def place_training(training: Training, device: torch.device) -> None:
    """Move a training to its device, in the form that the runtime and the reference share."""
    set_matmul_precision(training.precision)
    _materialize_expanded_buffers(training.model)
    training.model.to(device)
    if training.channels_last:
        training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for thing in training.state.values():
        if isinstance(thing, nn.Module):
            thing.to(device)
    normalize_optimizer(training.whole_optimizer, device)


def _materialize_expanded_buffers(model: nn.Module) -> None:
    """Make expanded buffers contiguous: their elements share memory and cannot be written."""
    for module in model.modules():
        buffers = own_buffers(module)
        for key, buffer in buffers.items():
            if buffer is not None and 0 in buffer.stride() and buffer.numel() > 1:
                buffers[key] = buffer.contiguous()


def set_matmul_precision(precision: str) -> None:
    """Set float32 ("float32") or TF32 ("tf32") for matmuls and convolutions; "" keeps torch's default.

    TF32 rounds factors to ten bits of mantissa and is several times faster on tensor cores. Torch's default is TF32 for
    convolutions and float32 for matmuls.
    """
    if precision:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
