"""Trainings that end at a loss: a small CNN on digits for cores, VGG-16 and ResNet-50 on CIFAR-10 for GPUs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from zoo import MODELS

import carpool
from carpool.runtime.data.datasets import TensorData, scaled_images

MOST_EPOCHS = 10_000  # only the target ends it
_SAMPLE_S = 0.0002  # that a sample takes where steps wait


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy, as published."""
    return cross_entropy(model(batch[0]), batch[1])


def small(
    target: float = 0.1, lr: float = 0.002, hidden: int = 32, batch_size: int = 256, steps: int = 0
) -> carpool.Training:
    """Handwritten digits."""
    model = MODELS["cnn"](channels=1, hidden=hidden)
    return _training(model, carpool.datasets.digits(), target, lr, batch_size, steps)


def paced(
    target: float = 0.1, lr: float = 0.02, batch_size: int = 256, steps: int = 0, fixed_s: float = 0.01
) -> carpool.Training:
    """The same, with steps that wait most of the time: devices are apart even where cores are not."""

    def slow_loss(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(fixed_s + _SAMPLE_S * len(batch[1]))
        return loss(model, batch)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    training = _training(model, carpool.datasets.digits(), target, lr, batch_size, steps)
    return replace(training, loss=slow_loss)


def vgg16(target: float = 0.3, lr: float = 0.02, batch_size: int = 512, steps: int = 0) -> carpool.Training:
    """CIFAR-10, from the file that CARPOOL_CIFAR10 names; one linear layer behind the convolutions."""
    return _training(MODELS["vgg16"](head="flat"), _cifar10(), target, lr, batch_size, steps)


def resnet50(target: float = 0.3, lr: float = 0.02, batch_size: int = 512, steps: int = 0) -> carpool.Training:
    """The same with another model."""
    return _training(MODELS["resnet50"](), _cifar10(), target, lr, batch_size, steps)


def keep_pixels(source: str, path: Path, count: int) -> None:
    """Write the first images of CIFAR-10, decoded, so that workers need not do it; their classes are interleaved."""
    train = carpool.datasets.cifar10(source).train.first(count)
    np.savez(path, images=train.tensors[0].numpy(), labels=train.tensors[1].numpy())


def _cifar10() -> carpool.datasets.Split:
    """From the JPEG file, from what `keep_pixels` wrote, or made up where there is neither."""
    path = os.environ.get("CARPOOL_CIFAR10", "")
    if not path.endswith(".pixels.npz"):
        return carpool.datasets.cifar10(path) if path else carpool.datasets.synthetic((3, 32, 32), size=8192)
    with np.load(path) as arrays:
        images, labels = (torch.from_numpy(arrays[name]) for name in ("images", "labels"))
    data = TensorData(images, labels, finish=scaled_images((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    return carpool.datasets.Split(data, data.first(512))


def _training(
    model: nn.Module, data: carpool.datasets.Split, target: float, lr: float, batch_size: int, steps: int = 0
) -> carpool.Training:
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        dataset=data.train,
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(steps=steps) if steps else carpool.Stop(epochs=MOST_EPOCHS, target_loss=target),
    )
