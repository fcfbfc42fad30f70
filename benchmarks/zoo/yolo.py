"""After YOLOv5 (the small one): a net that finds boxes on three grids. Its loss is in `boxes`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from zoo.blocks import Shortcut, conv_norm, scaled, twice

_conv = partial(conv_norm, eps=1e-3, momentum=0.03, activation=nn.SiLU)
# Width and height of three boxes for each grid, in pixels of a 640×640 picture: the published ones.
ANCHORS = (
    ((10.0, 13.0), (16.0, 30.0), (33.0, 23.0)),
    ((30.0, 61.0), (62.0, 45.0), (59.0, 119.0)),
    ((116.0, 90.0), (156.0, 198.0), (373.0, 326.0)),
)


class Partial(nn.Module):
    """Half of the channels pass through bottlenecks, half go by (a cross-stage partial block)."""

    def __init__(self, inputs: int, outputs: int, depth: int, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        bottlenecks = [nn.Sequential(_conv(half, half, 1), _conv(half, half)) for _ in range(depth)]
        self.deep = nn.Sequential(_conv(inputs, half, 1), *[Shortcut(b) if shortcut else b for b in bottlenecks])
        self.short, self.join = _conv(inputs, half, 1), _conv(2 * half, outputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """One block."""
        result: Tensor = self.join(torch.cat((self.deep(inputs), self.short(inputs)), dim=1))
        return result


class Pyramid(nn.Module):
    """Maxima over growing neighbourhoods, side by side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before, self.after = _conv(channels, channels // 2, 1), _conv(2 * channels, channels, 1)
        self.pool = nn.MaxPool2d(5, 1, padding=2)

    def forward(self, inputs: Tensor) -> Tensor:
        """One block."""
        levels = [self.before(inputs)]
        for _ in range(3):
            levels.append(self.pool(levels[-1]))
        result: Tensor = self.after(torch.cat(levels, dim=1))
        return result


class Detector(nn.Module):
    """Backbone, a path up and a path down between three grids, and one convolution per grid that tells the boxes."""

    def __init__(self, classes: int, width: float, channels: int) -> None:
        super().__init__()
        a, b, c, d, e = (scaled(count, width) for count in (32, 64, 128, 256, 512))
        self.classes = classes
        self.small = nn.Sequential(
            _conv(channels, a, 6, 2, padding=2),
            _conv(a, b, 3, 2),
            Partial(b, b, 1),
            _conv(b, c, 3, 2),
            Partial(c, c, 2),
        )
        self.middle = nn.Sequential(_conv(c, d, 3, 2), Partial(d, d, 3))
        self.large = nn.Sequential(_conv(d, e, 3, 2), Partial(e, e, 1), Pyramid(e))
        self.up_large, self.up_middle = _conv(e, d, 1), _conv(d, c, 1)
        self.mix_middle, self.mix_small = Partial(2 * d, d, 1, shortcut=False), Partial(2 * c, c, 1, shortcut=False)
        self.down_small, self.down_middle = _conv(c, c, 3, 2), _conv(d, d, 3, 2)
        self.end_middle, self.end_large = Partial(2 * c, d, 1, shortcut=False), Partial(2 * d, e, 1, shortcut=False)
        self.heads = nn.ModuleList(nn.Conv2d(count, 3 * (5 + classes), 1) for count in (c, d, e))
        for head in self.heads:  # few cells hold a box
            assert isinstance(head, nn.Conv2d)
            assert head.bias is not None
            nn.init.constant_(head.bias.data.view(3, -1)[:, 4:], -4.0)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Raw outputs per grid, fine to coarse: (samples, 3 anchors, height, width, 5 + classes)."""
        small = self.small(images)
        middle = self.middle(small)
        large = self.up_large(self.large(middle))
        middle = self.up_middle(self.mix_middle(torch.cat((twice(large), middle), dim=1)))
        small = self.mix_small(torch.cat((twice(middle), small), dim=1))
        middle = self.end_middle(torch.cat((self.down_small(small), middle), dim=1))
        large = self.end_large(torch.cat((self.down_middle(middle), large), dim=1))
        outputs = [head(grid) for head, grid in zip(self.heads, (small, middle, large), strict=True)]
        return [output.unflatten(1, (3, 5 + self.classes)).permute(0, 1, 3, 4, 2) for output in outputs]


def yolo(*, classes: int = 80, width: float = 1.0, channels: int = 3) -> nn.Module:
    """YOLOv5-small-like detector; the picture's sides must be multiples of 32."""
    return Detector(classes, width, channels)
