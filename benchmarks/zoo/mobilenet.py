"""MobileNetV3 (Howard and others, 2019), the large one: inverted bottlenecks, squeeze and excitation, hard swish."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from zoo.blocks import Mean2d, Shortcut, conv_norm, scaled, start

# Kernel, expanded channels, outputs, squeeze and excitation, hard swish, stride: table 1 of the paper.
_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
_conv = partial(conv_norm, eps=1e-3, momentum=0.01)


class Excite(nn.Module):
    """Weights each channel by what all places together say (squeeze and excitation)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(channels, squeezed, 1), nn.ReLU(), nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()
        )

    def forward(self, inputs: Tensor) -> Any:
        """The input times the gate."""
        return inputs * self.gate(inputs.mean((2, 3), keepdim=True))


def mobilenet_v3(
    *, classes: int = 10, width: float = 1.0, dropout: float = 0.2, channels: int = 3, stem_stride: int = 2
) -> nn.Module:
    """MobileNetV3-Large; ``stem_stride=1`` keeps small pictures larger for longer."""
    before = scaled(16, width)
    layers: list[nn.Module] = [_conv(channels, before, 3, stem_stride, activation=nn.Hardswish)]
    for kernel, expanded, outputs, excited, swish, stride in _LARGE:
        inner, outputs = scaled(expanded, width), scaled(outputs, width)
        layers.append(_bottleneck(before, inner, outputs, kernel, stride, excited, swish))
        before = outputs
    last, hidden = 6 * before, scaled(1280, width)
    layers.append(_conv(before, last, 1, activation=nn.Hardswish))
    head = [Mean2d(), nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    return start(nn.Sequential(*layers, *head))


def _bottleneck(
    inputs: int, inner: int, outputs: int, kernel: int, stride: int, excited: bool, swish: bool
) -> nn.Module:
    activation = nn.Hardswish if swish else nn.ReLU
    layers: list[nn.Module] = [] if inner == inputs else [_conv(inputs, inner, 1, activation=activation)]
    layers.append(_conv(inner, inner, kernel, stride, groups=inner, activation=activation))
    if excited:
        layers.append(Excite(inner, scaled(inner // 4, 1.0)))
    body = nn.Sequential(*layers, _conv(inner, outputs, 1, activation=None))
    return Shortcut(body) if stride == 1 and inputs == outputs else body
