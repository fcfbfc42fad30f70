"""Device setup of a training: placement, memory format and float32 matmul precision.

``precision`` names the products of float32 tensors on a GPU. ``float32`` keeps all their bits. ``tf32`` rounds factors
to ten bits of mantissa, which tensor cores multiply several times as fast. Where it is not given, torch's own choice
stands: convolutions in tf32, matrix products in float32. It changes bits, and is the same in every worker of a job.
"""

from __future__ import annotations

import torch
from torch import nn

from carpool.runtime.compat.torch_api import own_buffers
from carpool.runtime.engine.optimizer_step import normalize_optimizer
from carpool.runtime.engine.training import Training


def place_training(training: Training, device: torch.device) -> None:
    """Move a training to its device, in the form that the runtime and the reference share."""
    set_matmul_precision(training.precision)
    _spread_buffers(training.model)
    training.model.to(device)
    if training.channels_last:
        training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for thing in training.state.values():
        if isinstance(thing, nn.Module):
            thing.to(device)
    normalize_optimizer(training.optimizer, device)


def _spread_buffers(model: nn.Module) -> None:
    """Give every element of a buffer a place of its own: one that was expanded cannot be written to."""
    for module in model.modules():
        buffers = own_buffers(module)
        for key, buffer in buffers.items():
            if buffer is not None and 0 in buffer.stride() and buffer.numel() > 1:
                buffers[key] = buffer.contiguous()


def set_matmul_precision(precision: str) -> None:
    """Let this process multiply float32 numbers so; nothing is changed where nothing is asked."""
    if precision:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
