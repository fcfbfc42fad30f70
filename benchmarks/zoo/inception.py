"""Inception V3 (Szegedy and others, 2015) without the auxiliary classifier."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn

from zoo.blocks import Mean2d, Side, Size, conv_norm, start

_conv = partial(conv_norm, eps=1e-3)
_Step = tuple[int, Size]  # outputs, kernel


class _Builder:
    """Makes branches, with all channels multiplied by the net's width."""

    def __init__(self, width: float) -> None:
        self.width = width

    def channels(self, count: int) -> int:
        return max(4, round(count * self.width))

    def branch(self, inputs: int, *steps: _Step, shrink: bool = False) -> tuple[nn.Sequential, int]:
        """Convolutions one after another, the last with stride 2 and no padding if it is to shrink the picture."""
        layers = []
        for place, (outputs, kernel) in enumerate(steps):
            outputs = self.channels(outputs)
            last = shrink and place == len(steps) - 1
            layers.append(_conv(inputs, outputs, kernel, 2 if last else 1, padding=0 if last else None))
            inputs = outputs
        return nn.Sequential(*layers), inputs

    def side(self, inputs: int, *branches: tuple[_Step, ...], pooled: int) -> tuple[nn.Module, int]:
        """Branches side by side, one of them over the local mean."""
        made = [self.branch(inputs, *steps) for steps in branches]
        pool, outputs = self.branch(inputs, (pooled, 1))
        made.append((nn.Sequential(nn.AvgPool2d(3, 1, padding=1), pool), outputs))
        return Side([branch for branch, _ in made]), sum(count for _, count in made)

    def shrink(self, inputs: int, *branches: tuple[_Step, ...]) -> tuple[nn.Module, int]:
        """Branches that halve the picture, and a maximum that does."""
        made = [self.branch(inputs, *steps, shrink=True) for steps in branches]
        return Side([*[branch for branch, _ in made], nn.MaxPool2d(3, 2)]), inputs + sum(count for _, count in made)

    def fan(self, inputs: int) -> tuple[nn.Module, int]:
        """The last block: branches that end in a row and a column of three."""
        row, column = self.branch(self.channels(384), (384, (1, 3))), self.branch(self.channels(384), (384, (3, 1)))
        first = nn.Sequential(self.branch(inputs, (384, 1))[0], Side([row[0], column[0]]))
        row, column = self.branch(self.channels(384), (384, (1, 3))), self.branch(self.channels(384), (384, (3, 1)))
        second = nn.Sequential(self.branch(inputs, (448, 1), (384, 3))[0], Side([row[0], column[0]]))
        plain, direct = self.branch(inputs, (320, 1))
        pool, pooled = self.branch(inputs, (192, 1))
        branches = [plain, first, second, nn.Sequential(nn.AvgPool2d(3, 1, padding=1), pool)]
        return Side(branches), direct + 4 * self.channels(384) + pooled


def inception_v3(
    *,
    classes: int = 10,
    stem: Literal["cifar", "imagenet"] = "cifar",
    width: float = 1.0,
    dropout: float = 0.5,
    channels: int = 3,
) -> nn.Module:
    """Inception V3; the stem for CIFAR-10 has the same layers without strides and pooling."""
    make = _Builder(width)
    layers = _stem(make, channels, small=stem == "cifar")
    count = make.channels(192)

    def add(made: tuple[nn.Module, int]) -> None:
        nonlocal count
        layers.append(made[0])
        count = made[1]

    for pooled in (32, 64, 64):
        add(make.side(count, ((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), pooled=pooled))
    add(make.shrink(count, ((384, 3),), ((64, 1), (96, 3), (96, 3))))
    for inner in (128, 160, 160, 192):
        row, column = (inner, (1, 7)), (inner, (7, 1))
        short: tuple[_Step, ...] = ((inner, 1), row, (192, (7, 1)))
        long: tuple[_Step, ...] = ((inner, 1), column, row, column, (192, (1, 7)))
        add(make.side(count, ((192, 1),), short, long, pooled=192))
    add(make.shrink(count, ((192, 1), (320, 3)), ((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3))))
    add(make.fan(count))
    add(make.fan(count))
    return start(nn.Sequential(*layers, Mean2d(), nn.Dropout(dropout), nn.Linear(count, classes)))


def _stem(make: _Builder, channels: int, small: bool) -> list[nn.Module]:
    a, b, c, d = (make.channels(count) for count in (32, 64, 80, 192))
    pool = nn.Identity() if small else nn.MaxPool2d(3, 2)
    padding = None if small else 0
    return [
        _conv(channels, a, 3, 1 if small else 2, padding=padding),
        _conv(a, a, 3, padding=padding),
        _conv(a, b),
        pool,
        _conv(b, c, 1),
        _conv(c, d, 3, padding=padding),
        pool,
    ]
