"""Training on handwritten digits that ends at a test accuracy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import carpool


def digits(goal: float = 0.95, lr: float = 0.02, hidden: int = 64) -> carpool.Training:
    """One hidden layer, plain SGD: slow enough for tuning to matter."""
    data = carpool.datasets.digits()
    images, labels = data.test.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float((model(images).argmax(1) == labels).float().mean())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        dataset=data.train,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=32,
        stop=carpool.Stop(epochs=2000, target_metric=f"accuracy >= {goal}"),
        evaluate=evaluate,
    )
