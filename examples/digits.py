"""Handwritten digits: a perceptron with dropout and Adam, and a small CNN with BatchNorm and SGD.

The data ship inside scikit-learn, so there is nothing to download. Run these and the other examples with

    carpool run examples/jobs.toml

or one of them alone, by a job file with that entry only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import carpool

OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the samples of the batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def mlp(
    lr: float = 2e-3,
    hidden: int = 256,
    dropout: float = 0.2,
    optimizer: str = "adam",
    batch_size: int = 64,
    epochs: int = 15,
) -> carpool.Training:
    """One hidden layer with dropout; any of Adam's family trains it."""
    data = carpool.datasets.digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))
    return carpool.Training(
        model=model,
        optimizer=OPTIMIZERS[optimizer](model.parameters(), lr=lr),
        dataset=data.train,
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=epochs, target_loss=0.01),
        evaluate=lambda model: {"accuracy": carpool.datasets.accuracy(model, data.test)},
        best="max accuracy",
    )


def cnn(lr: float = 0.05, channels: int = 16, batch_size: int = 64, epochs: int = 10) -> carpool.Training:
    """Two convolutions with BatchNorm; the learning rate falls along a cosine."""
    data = carpool.datasets.digits()
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    return carpool.Training(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        schedule_every="epoch",
        dataset=data.train,
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=epochs, target_metric="accuracy >= 0.995"),
        evaluate=lambda model: {"accuracy": carpool.datasets.accuracy(model, data.test)},
        best="max accuracy",
    )
