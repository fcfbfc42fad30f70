"""ResNet (He and others, 2015), with the stem that is usual for CIFAR-10 or the published one."""

from __future__ import annotations

from typing import Literal

from torch import nn

from zoo.blocks import Mean2d, Shortcut, conv_norm, scaled, start

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(
    depth: int = 18,
    *,
    classes: int = 10,
    stem: Literal["cifar", "imagenet"] = "cifar",
    width: float = 1.0,
    channels: int = 3,
) -> nn.Module:
    """ResNet of a depth (18, 34, 50, 101 or 152); the strides of bottlenecks are in the 3×3 convolutions."""
    deep = depth >= 50
    before = scaled(64, width)
    layers: list[nn.Module] = (
        [conv_norm(channels, before)]
        if stem == "cifar"
        else [conv_norm(channels, before, 7, 2), nn.MaxPool2d(3, 2, padding=1)]
    )
    for stage, count in enumerate(_BLOCKS[depth]):
        inner = scaled(64 << stage, width)
        for place in range(count):
            stride = 2 if stage and not place else 1
            outputs = 4 * inner if deep else inner
            layers.append(_block(before, inner, outputs, stride, deep))
            before = outputs
    return start(nn.Sequential(*layers, Mean2d(), nn.Linear(before, classes)))


def _block(inputs: int, inner: int, outputs: int, stride: int, deep: bool) -> nn.Module:
    body = (
        nn.Sequential(
            conv_norm(inputs, inner, 1),
            conv_norm(inner, inner, 3, stride),
            conv_norm(inner, outputs, 1, activation=None),
        )
        if deep
        else nn.Sequential(conv_norm(inputs, inner, 3, stride), conv_norm(inner, outputs, activation=None))
    )
    same = stride == 1 and inputs == outputs
    return Shortcut(body, None if same else conv_norm(inputs, outputs, 1, stride, activation=None), nn.ReLU())
