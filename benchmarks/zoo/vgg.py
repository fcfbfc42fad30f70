"""VGG (Simonyan and Zisserman, 2014): plain stacks of 3×3 convolutions.

Two heads: ``wide`` is the published one (7×7 places, two layers of 4096), 134 M parameters with ten classes; ``flat``
is the one linear layer that is usual for CIFAR-10, 14.7 M.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from zoo.blocks import Grid, Mean2d, blank, scaled, start

_CHANNELS = (64, 128, 256, 512, 512)
_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(
    depth: int = 16,
    *,
    classes: int = 10,
    norm: bool = True,
    head: Literal["wide", "flat"] = "wide",
    width: float = 1.0,
    dropout: float = 0.5,
    channels: int = 3,
) -> nn.Module:
    """VGG of a depth (11, 13, 16 or 19), with BatchNorm after each convolution unless ``norm`` is off."""
    layers: list[nn.Module] = []
    before = channels
    for wanted, count in zip(_CHANNELS, _CONVOLUTIONS[depth], strict=True):
        for _ in range(count):
            outputs = scaled(wanted, width)
            # The published net keeps the convolutions' biases where BatchNorm follows.
            layers += [
                nn.Conv2d(before, outputs, 3, padding=1),
                *([nn.BatchNorm2d(outputs)] if norm else []),
                nn.ReLU(),
            ]
            before = outputs
        layers.append(nn.MaxPool2d(2))
    flat = [Mean2d(), nn.Linear(before, classes)]
    top = _wide(before, scaled(4096, width), classes, dropout) if head == "wide" else flat
    return start(nn.Sequential(*layers, *top))


def _wide(channels: int, hidden: int, classes: int, dropout: float) -> list[nn.Module]:
    return [
        Grid(7),
        nn.Flatten(),
        blank(nn.Linear, channels * 49, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        blank(nn.Linear, hidden, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    ]
