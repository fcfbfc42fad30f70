"""ShuffleNetV2 (Ma and others, 2018): half of the channels pass through, then the halves are shuffled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.blocks import Mean2d, conv_norm, start

# Channels of the three stages and of the last convolution, by width: table 5 of the paper.
_STAGES = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
_REPEATS = (4, 8, 4)


class Unit(nn.Module):
    """One unit: with stride 1 half of the channels are kept as they are, with stride 2 both branches see all."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.halve = stride == 1
        self.deep = nn.Sequential(
            conv_norm(half if self.halve else inputs, half, 1),
            conv_norm(half, half, 3, stride, groups=half, activation=None),
            conv_norm(half, half, 1),
        )
        self.short: nn.Module = nn.Identity()
        if not self.halve:
            self.short = nn.Sequential(
                conv_norm(inputs, inputs, 3, stride, groups=inputs, activation=None), conv_norm(inputs, half, 1)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Both branches, their channels taken in turn."""
        left, right = inputs.chunk(2, dim=1) if self.halve else (inputs, inputs)
        return torch.stack((self.short(left), self.deep(right)), dim=2).flatten(1, 2)


def shufflenet_v2(*, classes: int = 10, width: float = 1.0, channels: int = 3) -> nn.Module:
    """ShuffleNetV2 of a width of 0.5, 1.0, 1.5 or 2.0."""
    *stages, last = _STAGES[width]
    before = 24
    layers: list[nn.Module] = [conv_norm(channels, before, 3, 2), nn.MaxPool2d(3, 2, padding=1)]
    for outputs, count in zip(stages, _REPEATS, strict=True):
        for place in range(count):
            layers.append(Unit(before, outputs, 1 if place else 2))
            before = outputs
    return start(nn.Sequential(*layers, conv_norm(before, last, 1), Mean2d(), nn.Linear(last, classes)))
