"""A residual CNN on images, as a user of carpool writes it."""

from __future__ import annotations

import torch
from networks import pictures, residual_net
from torch.nn.functional import cross_entropy

import carpool


def training(channels: int, batch_size: int, steps: int) -> carpool.Training:
    """SGD with momentum."""
    model = residual_net(channels)
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4),
        dataset=carpool.datasets.TensorData(*pictures(2048)),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=carpool.Stop(steps=steps),
    )
