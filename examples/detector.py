"""A small detector: finds rectangles of three colours in noisy pictures that are made up here.

    carpool run examples/jobs.toml

For your own pictures replace `made_up_scenes`. The picture is cut into a grid; each cell tells whether a box has its
centre there, where exactly, how large, and of which class. Shapes never change, however many boxes a picture has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import carpool

CLASSES = 3
CELL = 8  # pixels


def made_up_scenes(count: int, image: int, objects: int = 3) -> tuple[Tensor, Tensor]:
    """Pictures, and their boxes (count, objects, 5): class or −1, centre x and y, width, height as shares."""
    dice = torch.Generator().manual_seed(1)
    kinds = torch.randint(-1, CLASSES, (count, objects), generator=dice)
    centres = 0.2 + 0.6 * torch.rand(count, objects, 2, generator=dice)
    sizes = 0.15 + 0.2 * torch.rand(count, objects, 2, generator=dice)
    pictures = 0.2 * torch.randn(count, 3, image, image, generator=dice)
    axis = (torch.arange(image) + 0.5) / image
    colours = torch.eye(CLASSES)
    for place in range(objects):
        near = [(axis - centres[:, place, side, None]).abs() < sizes[:, place, side, None] / 2 for side in (0, 1)]
        inside = near[1][:, :, None] & near[0][:, None, :] & (kinds[:, place, None, None] >= 0)
        colour = colours[kinds[:, place].clamp(min=0)][:, :, None, None]
        pictures = torch.where(inside[:, None], colour, pictures)
    return pictures, torch.cat((kinds[..., None].float(), centres, sizes), dim=-1)


def to_grid(boxes: Tensor, side: int) -> Tensor:
    """What each cell should tell (count, side, side, 6): there, x and y inside the cell, width, height, class."""
    grid = torch.zeros(len(boxes), side, side, 6)
    for place in range(boxes.shape[1]):
        kind, x, y, width, height = boxes[:, place].unbind(1)
        column, row = (x * side).long(), (y * side).long()
        told = torch.stack((torch.ones_like(x), x * side - column, y * side - row, width, height, kind), dim=1)
        chosen = (kind >= 0).nonzero()[:, 0]
        grid[chosen, row[chosen], column[chosen]] = told[chosen]
    return grid


def detector(channels: int) -> nn.Module:
    """Convolutions down to one vector per cell."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.Conv2d(4 * channels, 4 * channels, 5, padding=2, bias=False), nn.BatchNorm2d(4 * channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(4 * channels, 5 + CLASSES, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Presence everywhere, place and class where there is a box; a mean over pictures, however the batch is cut."""
    pictures, wanted = batch
    told = model(pictures).permute(0, 2, 3, 1)
    there = wanted[..., 0]
    presence = binary_cross_entropy_with_logits(told[..., 0], there, reduction="none").sum((1, 2))
    place = (told[..., 1:5].sigmoid() - wanted[..., 1:5]).square().sum(-1)
    kind = cross_entropy(told[..., 5:].permute(0, 3, 1, 2), wanted[..., 5].long().clamp(min=0), reduction="none")
    error: Tensor = presence + (there * (5.0 * place + kind)).sum((1, 2))
    return error.mean()


def boxes_of(told: Tensor) -> Tensor:
    """Corners (…, 4) of what each cell tells, in cells."""
    side = told.shape[1]
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    middle = torch.stack((told[..., 1] + columns, told[..., 2] + rows), dim=-1)
    half = told[..., 3:5] * side / 2
    return torch.cat((middle - half, middle + half), dim=-1)


def yolo(
    image: int = 64, channels: int = 12, samples: int = 600, batch_size: int = 32, epochs: int = 12, lr: float = 5e-3
) -> carpool.Training:
    """The last sixth of the pictures is kept to judge by."""
    pictures, boxes = made_up_scenes(samples, image)
    grid = to_grid(boxes, image // CELL)
    cut = samples * 5 // 6
    model = detector(channels)

    def evaluate(model: nn.Module) -> dict[str, float]:
        """How many boxes are found: told to be there, of the right class, and overlapping by more than half."""
        device = next(model.parameters()).device
        told = model(pictures[cut:].to(device)).permute(0, 2, 3, 1).cpu()
        wanted = grid[cut:]
        guess = torch.cat((told[..., :1], told[..., 1:5].sigmoid()), dim=-1)
        one, two = boxes_of(guess), boxes_of(wanted)
        inner = (torch.minimum(one[..., 2:], two[..., 2:]) - torch.maximum(one[..., :2], two[..., :2])).clamp(min=0)
        area = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (one, two)]
        overlap = inner.prod(-1) / (area[0] + area[1] - inner.prod(-1)).clamp(min=1e-6)
        there = wanted[..., 0] > 0
        found = there & (told[..., 0] > 0) & (told[..., 5:].argmax(-1) == wanted[..., 5]) & (overlap > 0.5)
        return {"recall": float(found.sum() / there.sum())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        dataset=carpool.datasets.TensorData(pictures[:cut], grid[:cut]),
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=epochs, target_metric="recall >= 0.95"),
        evaluate=evaluate,
        best="max recall",
    )
