"""CIFAR-10: a small residual CNN with flips and shifts, and a learning rate that rises and falls.

    CARPOOL_CIFAR10=/data/cifar10_jpeg.npz carpool run examples/jobs.toml

`carpool.datasets.cifar10` says what the npz file holds. Without it, made-up pictures of the same shape are used, so
that the example runs anywhere; their accuracy means nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import carpool


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), nn.ReLU(), conv(channels, channels))

    def forward(self, images: Tensor) -> Tensor:
        """Body plus shortcut."""
        return torch.relu(images + self.body(images))


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution with BatchNorm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


def flip_and_shift(batch: tuple[Tensor, Tensor], chance: Any) -> tuple[Tensor, Tensor]:
    """Mirror half of the pictures and move each by up to two pixels.

    ``chance`` gives every sample its own numbers, which follow from seed, epoch and sample: wherever a picture is
    computed, it looks the same.
    """
    images, labels = batch
    count, _, height, width = images.shape
    mirrored = torch.where(chance.uniform().view(-1, 1, 1, 1) < 0.5, images.flip(-1), images)
    down, right = chance.integers(0, 5, columns=2).unbind(1)
    rows = (torch.arange(height) + down[:, None])[:, :, None]
    columns = (torch.arange(width) + right[:, None])[:, None, :]
    wide = pad(mirrored, (2, 2, 2, 2)).permute(0, 2, 3, 1)
    moved = wide[torch.arange(count)[:, None, None], rows, columns].permute(0, 3, 1, 2)
    return moved.contiguous(), labels


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy, a little smoothed."""
    return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def cnn(
    path: str = "",
    channels: int = 32,
    batch_size: int = 128,
    epochs: int = 10,
    lr: float = 0.2,
    samples: int = 0,
) -> carpool.Training:
    """A residual net; ``samples`` takes only the first ones, for a quick look."""
    path = path or os.environ.get("CARPOOL_CIFAR10", "")
    data = carpool.datasets.cifar10(path) if path else carpool.datasets.synthetic((3, 32, 32), size=samples or 4096)
    train, test = (data.train.first(samples), data.test.first(samples)) if samples else (data.train, data.test)
    model = nn.Sequential(
        *[conv(3, channels), nn.ReLU()],
        *[conv(channels, 2 * channels, 2), nn.ReLU(), Residual(2 * channels)],
        *[conv(2 * channels, 4 * channels, 2), nn.ReLU(), Residual(4 * channels)],
        *[nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = epochs * -(-len(train) // batch_size)
    return carpool.Training(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps + 1),
        dataset=train,
        augment=flip_and_shift if path else None,  # made-up pictures mean something else when mirrored
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=epochs),
        evaluate=lambda model: {"accuracy": carpool.datasets.accuracy(model, test)},
        best="max accuracy",
    )
