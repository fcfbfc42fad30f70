"""The loss of a detector on grids: fixed shapes whatever number of boxes a picture has, and a mean over pictures.

A picture's boxes come as rows (class, centre x, centre y, width, height), the last four as shares of the picture; rows
of class −1 only fill up. A box is told by the cell its centre lies in, on every grid and for every anchor whose sides
are within four times of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from zoo.yolo import ANCHORS

_BOX, _THERE, _CLASS = 0.05, 1.0, 0.5  # weights of the three parts, as published
_BALANCE = (4.0, 1.0, 0.4)  # weight of each grid's "there is a box"


def detection_loss(grids: Sequence[Tensor], boxes: Tensor) -> Tensor:
    """The mean over pictures of box, presence and class errors; ``grids`` as `Detector` gives them."""
    total = torch.zeros(len(boxes), device=boxes.device)
    for grid, anchors, balance in zip(grids, ANCHORS, _BALANCE, strict=True):
        box, there, kind = _grid_losses(grid, anchors, boxes)
        total = total + _BOX * box + _THERE * balance * there + _CLASS * kind
    return total.mean()


def _grid_losses(
    grid: Tensor, anchors: tuple[tuple[float, float], ...], boxes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three errors for each picture, on one grid."""
    _, num_anchors, height, width, _ = grid.shape
    # As shares of the picture; filled on the device, since a tensor made from a list is copied from the host.
    wide, high = (torch.stack([boxes.new_full((), pair[side] / 640.0) for pair in anchors]) for side in (0, 1))
    kinds, middle_x, middle_y, box_w, box_h = boxes[:, :, None, :].unbind(-1)  # each (pictures, boxes, 1)
    column = (middle_x * width).long().clamp(0, width - 1)
    row = (middle_y * height).long().clamp(0, height - 1)
    ratios = [torch.maximum(a / b, b / a) for a, b in ((box_w.clamp(min=1e-4), wide), (box_h.clamp(min=1e-4), high))]
    matched = (kinds >= 0) & (torch.maximum(*ratios) < 4.0)  # (pictures, boxes, anchors)

    cells = grid.flatten(2, 3)  # (pictures, anchors, cells, outputs)
    place = (row * width + column).transpose(1, 2).expand(-1, num_anchors, -1)  # (pictures, anchors, boxes)
    told = cells.gather(2, place[..., None].expand(-1, -1, -1, cells.shape[-1])).transpose(1, 2)
    x, y, w, h = (2.0 * told[..., :4].sigmoid()).unbind(-1)
    overlap = _overlap(
        ((x - 0.5 + column) / width, (y - 0.5 + row) / height, w.square() * wide, h.square() * high),
        (middle_x, middle_y, box_w, box_h),
    )
    box = _mean_where(matched, 1.0 - overlap)

    here = torch.arange(height * width, device=grid.device) == place.transpose(1, 2)[..., None]
    wanted = torch.where(here & matched[..., None], overlap.detach().clamp(min=0.0)[..., None], 0.0).amax(1)
    there = binary_cross_entropy_with_logits(cells[..., 4], wanted, reduction="none").mean((1, 2))

    classes = torch.arange(cells.shape[-1] - 5, device=grid.device)
    right = (kinds[..., None] == classes).to(grid.dtype).expand_as(told[..., 5:])
    kind = _mean_where(matched, binary_cross_entropy_with_logits(told[..., 5:], right, reduction="none").mean(-1))
    return box, there, kind


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    """The mean over the matched pairs of each picture; nothing where there is none."""
    return torch.where(mask, values, 0.0).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)


def _overlap(told: Sequence[Tensor], true: Sequence[Tensor]) -> Tensor:
    """Generalised intersection over union of boxes given as centre and size: 1 where equal, down to −1."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = told, true
    across = _common(x1, w1, x2, w2), _common(y1, h1, y2, h2)
    around = _hull(x1, w1, x2, w2) * _hull(y1, h1, y2, h2)
    inside = across[0] * across[1]
    union = w1 * h1 + w2 * h2 - inside + 1e-9
    return inside / union - (around - union) / (around + 1e-9)


def _common(a: Tensor, size_a: Tensor, b: Tensor, size_b: Tensor) -> Tensor:
    right, left = torch.minimum(a + size_a / 2, b + size_b / 2), torch.maximum(a - size_a / 2, b - size_b / 2)
    return (right - left).clamp(min=0.0)


def _hull(a: Tensor, size_a: Tensor, b: Tensor, size_b: Tensor) -> Tensor:
    return torch.maximum(a + size_a / 2, b + size_b / 2) - torch.minimum(a - size_a / 2, b - size_b / 2)
