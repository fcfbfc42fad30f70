"""The bricks of convolutional nets: convolution with normalisation, branches, shortcuts, pooling with a fixed order.

Activations are never in place and pooling is written so that its gradient is summed in one order, so that a net can be
captured as a graph and repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from zoo.drawing import draw_normal

Size = int | tuple[int, int]
Activation = Callable[[], nn.Module]
M = TypeVar("M", bound=nn.Module)


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: Size = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: Activation | None = nn.ReLU,
    padding: Size | None = None,
    eps: float = 1e-5,
    momentum: float = 0.1,
) -> nn.Sequential:
    """Convolution, BatchNorm and activation; padded so that stride 1 keeps the size, unless told otherwise."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=eps, momentum=momentum),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class Side(nn.ModuleList):
    """Branches over the same input, side by side: their channels one after another."""

    def forward(self, inputs: Tensor) -> Tensor:
        """All branches."""
        return torch.cat([branch(inputs) for branch in self], dim=1)


class Shortcut(nn.Module):
    """The body's output plus the input, which ``match`` brings into the body's shape."""

    def __init__(self, body: nn.Module, match: nn.Module | None = None, then: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.match = match or nn.Identity()
        self.then = then or nn.Identity()

    def forward(self, inputs: Tensor) -> Any:
        """Body plus shortcut."""
        return self.then(self.body(inputs) + self.match(inputs))


class Mean2d(nn.Module):
    """The mean over all places: global average pooling with a gradient that is the same every time."""

    def forward(self, inputs: Tensor) -> Tensor:
        """From (samples, channels, height, width) to (samples, channels)."""
        return inputs.mean((2, 3))


class Grid(nn.Module):
    """Averages a picture to ``size`` × ``size`` places, and repeats where it has fewer.

    Torch's adaptive pooling does the same, but its gradient on a GPU is summed in any order; it is used only where the
    sizes do not divide each other.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, inputs: Tensor) -> Tensor:
        """From (…, height, width) to (…, size, size)."""
        count, channels, height, width = inputs.shape
        size = self.size
        if height == width == 1:
            return inputs.expand(count, channels, size, size)
        if height % size == 0 and width % size == 0:
            return inputs.reshape(count, channels, size, height // size, size, width // size).mean((3, 5))
        return adaptive_avg_pool2d(inputs, size)


def twice(inputs: Tensor) -> Tensor:
    """Each place of a picture as 2 × 2 places (nearest upsampling, its gradient a plain sum)."""
    count, channels, height, width = inputs.shape
    wide = inputs[:, :, :, None, :, None].expand(count, channels, height, 2, width, 2)
    return wide.reshape(count, channels, 2 * height, 2 * width)


def scaled(channels: int, width: float) -> int:
    """Channels times a width, as the nearest multiple of 8 that does not lose more than a tenth (MobileNet's rule)."""
    wanted = channels * width
    near = max(8, int(wanted + 4) // 8 * 8)
    return near + 8 if near < 0.9 * wanted else near


def blank(kind: Callable[..., M], *sizes: int) -> M:
    """A layer whose weights are set afterwards: large ones would be drawn twice, which takes as long as a start."""
    made: M = nn.utils.skip_init(kind, *sizes, device=torch.get_default_device())  # type: ignore[no-untyped-call]
    return made


def start(model: nn.Module) -> nn.Module:
    """Set initial weights: He's normal ones for convolutions, small normal ones for the linear layers behind."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            draw_normal(module.weight, 0.01)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
