"""A language model, as a user of carpool writes it."""

from __future__ import annotations

import torch
from networks import CharacterModel, texts
from torch.nn.functional import cross_entropy

import carpool


def training(hidden: int, batch_size: int, steps: int) -> carpool.Training:
    """Adam, clipped."""
    model = CharacterModel(64, hidden)
    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        dataset=carpool.datasets.TensorData(*texts(2048, 32, 64)),
        loss=lambda model, batch: cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batch_size=batch_size,
        clip_norm=1.0,
        stop=carpool.Stop(steps=steps),
    )
