"""Trainings that end at a loss: a small CNN on digits for cores, VGG-16 and ResNet-50 on CIFAR-10 for GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.zoo import MODELS

MOST_EPOCHS = 10_000  # only the target ends it


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy, as published."""
    return cross_entropy(model(batch[0]), batch[1])


def small(target: float = 0.1, lr: float = 0.002, hidden: int = 32, batch_size: int = 256) -> carpool.Training:
    """Handwritten digits."""
    model = MODELS["cnn"](channels=1, hidden=hidden)
    return _training(model, carpool.datasets.digits(), target, lr, batch_size)


def vgg16(target: float = 0.3, lr: float = 0.01, batch_size: int = 512) -> carpool.Training:
    """CIFAR-10, from the file that CARPOOL_CIFAR10 names."""
    return _training(MODELS["vgg16"](), _cifar10(), target, lr, batch_size)


def resnet50(target: float = 0.3, lr: float = 0.01, batch_size: int = 512) -> carpool.Training:
    """The same with another model."""
    return _training(MODELS["resnet50"](), _cifar10(), target, lr, batch_size)


def _cifar10() -> carpool.datasets.Split:
    path = os.environ.get("CARPOOL_CIFAR10", "")
    return carpool.datasets.cifar10(path) if path else carpool.datasets.synthetic((3, 32, 32), size=8192)


def _training(
    model: nn.Module, data: carpool.datasets.Split, target: float, lr: float, batch_size: int
) -> carpool.Training:
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        dataset=data.train,
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=MOST_EPOCHS, target_loss=target),
    )
