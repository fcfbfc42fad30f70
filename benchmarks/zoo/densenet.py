"""DenseNet (Huang and others, 2016): every layer sees all layers before it."""

from __future__ import annotations

from typing import Literal

from torch import nn

from zoo.blocks import Mean2d, Side, conv_norm, start

_BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
_BOTTLENECK = 4  # inner channels of a layer, in units of its growth


def densenet(
    depth: int = 121,
    *,
    classes: int = 10,
    growth: int = 32,
    stem: Literal["cifar", "imagenet"] = "cifar",
    channels: int = 3,
) -> nn.Module:
    """DenseNet-BC of a depth (121, 169 or 201); between blocks channels and picture are halved."""
    before = 2 * growth
    layers: list[nn.Module] = (
        [conv_norm(channels, before)]
        if stem == "cifar"
        else [conv_norm(channels, before, 7, 2), nn.MaxPool2d(3, 2, padding=1)]
    )
    for stage, count in enumerate(_BLOCKS[depth]):
        if stage:
            layers += [_norm_conv(before, before // 2, 1), nn.AvgPool2d(2)]
            before //= 2
        for _ in range(count):
            inner = _BOTTLENECK * growth
            layer = nn.Sequential(_norm_conv(before, inner, 1), _norm_conv(inner, growth, 3))
            layers.append(Side([nn.Identity(), layer]))
            before += growth
    return start(nn.Sequential(*layers, nn.BatchNorm2d(before), nn.ReLU(), Mean2d(), nn.Linear(before, classes)))


def _norm_conv(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Normalisation first, as this net has it."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), convolution)
