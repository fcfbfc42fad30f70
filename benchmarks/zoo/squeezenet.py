"""SqueezeNet 1.1 (Iandola and others, 2016): few 1×1 channels feed many 1×1 and 3×3 ones."""

from __future__ import annotations

from typing import Literal

from torch import nn

from zoo.blocks import Mean2d, Side, scaled, start

# Squeezed and expanded channels of each fire module; None halves the picture.
_FIRES = ((16, 64), (16, 64), None, (32, 128), (32, 128), None, (48, 192), (48, 192), (64, 256), (64, 256))


def squeezenet(
    *,
    classes: int = 10,
    stem: Literal["cifar", "imagenet"] = "cifar",
    width: float = 1.0,
    dropout: float = 0.5,
    channels: int = 3,
) -> nn.Module:
    """SqueezeNet 1.1; the stem for CIFAR-10 keeps the picture's size in the first convolution."""
    before = scaled(64, width)
    small = stem == "cifar"
    first = nn.Conv2d(channels, before, 3, 1 if small else 2, padding=1 if small else 0)
    layers: list[nn.Module] = [first, nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    for fire in _FIRES:
        if fire is None:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            continue
        squeezed, expanded = (scaled(channels, width) for channels in fire)
        layers.append(_fire(before, squeezed, expanded))
        before = 2 * expanded
    last = nn.Conv2d(before, classes, 1)
    model = start(nn.Sequential(*layers, nn.Dropout(dropout), last, nn.ReLU(), Mean2d()))
    nn.init.normal_(last.weight, 0.0, 0.01)  # larger ones die behind the last activation
    return model


def _fire(inputs: int, squeezed: int, expanded: int) -> nn.Module:
    wide = [nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)]
    return nn.Sequential(nn.Conv2d(inputs, squeezed, 1), nn.ReLU(), Side(wide), nn.ReLU())
