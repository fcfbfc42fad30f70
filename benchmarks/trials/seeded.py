"""Trainings on self-made data for runs of the seeds' policies: plain PyTorch and torchvision, of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import carpool

_CLASSES = 10
_NOISE = 2.0  # standard deviation of the inputs about the centre of their class
_CHANNELS = 0.3  # standard deviation of the mean of a channel
_MOST_STEPS = 1_000_000  # of a training that ends at a loss


def mlp(width: int = 1024, depth: int = 3, features: int = 256, **more: Any) -> carpool.Training:
    """Linear layers."""
    layers: list[nn.Module] = [nn.Linear(features, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return _training(nn.Sequential(*layers, nn.Linear(width, _CLASSES)), (features,), **more)


def conv(width: int = 64, depth: int = 4, size: int = 32, **more: Any) -> carpool.Training:
    """Convolutions: much computation and few parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES)]
    return _training(nn.Sequential(*layers, *head), (3, size, size), **more)


def vision(name: str = "resnet18", size: int = 64, **more: Any) -> carpool.Training:
    """A network of torchvision with random weights."""
    from torchvision import models

    return _training(getattr(models, name)(num_classes=_CLASSES), (3, size, size), **more)


class Encoder(nn.Module):
    """A transformer over a sequence of vectors, with a causal mask."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, rows: Tensor) -> Tensor:
        """Classify each sequence by its last position."""
        return self.head(self.layers(rows, mask=self.mask, is_causal=True)[:, -1])


def encoder(width: int = 256, depth: int = 4, length: int = 64, **more: Any) -> carpool.Training:
    """A transformer."""
    return _training(Encoder(width, depth, length), (length, width), **more)


class Recurrent(nn.Module):
    """An LSTM over a sequence of vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, _CLASSES)
        self.length = length

    def forward(self, rows: Tensor) -> Tensor:
        """Classify each sequence by its last position."""
        return self.head(self.layers(rows)[0][:, -1])


def recurrent(width: int = 256, length: int = 32, **more: Any) -> carpool.Training:
    """An LSTM."""
    return _training(Recurrent(width, length), (length, width), **more)


def _training(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    batch: int = 64,
    steps: int = 0,
    target: float = 0.0,
    samples: int = 4096,
    lr: float = 0.001,
    data_seed: int = 0,
) -> carpool.Training:
    """Classes of noisy points, which every network can learn; ends after steps or at a loss."""
    random = torch.Generator().manual_seed(data_seed)
    centres = torch.randn((_CLASSES, *shape), generator=random)
    if len(shape) > 2:  # a mean for each channel, which pooling keeps
        centres += _CHANNELS * torch.randn((_CLASSES, shape[0], 1, 1), generator=random)
    labels = torch.randint(_CLASSES, (samples,), generator=random)
    rows = centres[labels] + _NOISE * torch.randn((samples, *shape), generator=random)
    stop = carpool.Stop(steps=_MOST_STEPS, target_loss=target) if target else carpool.Stop(steps=steps)
    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        dataset=TensorDataset(rows, labels),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch,
        stop=stop,
    )
