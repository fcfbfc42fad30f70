"""Small trainings of different speeds on handwritten digits, cut to a number of steps."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo import MODELS

import carpool


def mlp(hidden: int, steps: int, pause_s: float = 0.0) -> carpool.Training:
    """Two hidden layers."""
    layers = (nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return _training(nn.Sequential(*layers, nn.Linear(hidden, 10)), steps, pause_s)


def cnn(hidden: int, steps: int, pause_s: float = 0.0) -> carpool.Training:
    """Two convolutions."""
    return _training(MODELS["cnn"](channels=1, hidden=hidden), steps, pause_s)


def _training(model: nn.Module, steps: int, pause_s: float) -> carpool.Training:
    def after_update(model: nn.Module, step: int) -> None:
        time.sleep(pause_s)  # a step that waits, for input say, lasts as long on a machine that others use too

    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        dataset=carpool.datasets.digits().train,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=64,
        stop=carpool.Stop(steps=steps),
        after_update=after_update if pause_s else None,
    )
