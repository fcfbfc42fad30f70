"""A perceptron with many parameters and few samples per step: updates take longer than the pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import carpool


def training(width: int = 2048, layers: int = 5, batch_size: int = 24, samples: int = 480) -> carpool.Training:
    """Adam on a perceptron; 21 million parameters unless told otherwise."""
    body = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *body, nn.Linear(width, 10))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        dataset=carpool.datasets.TensorData(torch.randn(samples, 64), torch.randint(0, 10, (samples,))),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=carpool.Stop(steps=1000),
    )
