"""Networks and data shared by the carpool and the DDP versions; counted for neither."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


def residual_net(channels: int) -> nn.Module:
    """The network of examples/cifar10_cnn.py."""
    return nn.Sequential(
        *[conv(3, channels), nn.ReLU()],
        *[conv(channels, 2 * channels, 2), nn.ReLU(), Residual(2 * channels)],
        *[conv(2 * channels, 4 * channels, 2), nn.ReLU(), Residual(4 * channels)],
        *[nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10)],
    )


class CharacterModel(nn.Module):
    """The network of examples/lstm_language_model.py."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the character after each one."""
        states, _ = self.lstm(self.embedding(text))
        logits: Tensor = self.output(states)
        return logits


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Made-up pictures of CIFAR-10's shape."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 32, 32, generator=chance), torch.randint(0, 10, (size,), generator=chance)


def texts(size: int, length: int, characters: int) -> tuple[Tensor, Tensor]:
    """Made-up texts, and the same moved by one character."""
    stream = torch.randint(0, characters, (size * length + 1,), generator=torch.Generator().manual_seed(1))
    return stream[:-1].view(size, length), stream[1:].view(size, length)
