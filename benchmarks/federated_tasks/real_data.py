"""Entries of federated trainings on real data: pictures of CIFAR-10, digits, and characters of a text.

CARPOOL_DATA=/data   # a folder with cifar10/cifar10_jpeg.npz and tinyshakespeare/input.txt
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import TensorDataset

import carpool

DATA = Path(os.environ.get("CARPOOL_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


class Context(nn.Module):
    """Predicts the next character from the ones before it."""

    def __init__(self, length: int, symbols: int, hidden: int) -> None:
        super().__init__()
        self.symbols = symbols
        self.body = nn.Sequential(nn.Linear(length * symbols, hidden), nn.ReLU(), nn.Linear(hidden, symbols))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next one."""
        return self.body(one_hot(tokens, self.symbols).flatten(1).float())


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the samples of the batch."""
    return cross_entropy(model(batch[0]), batch[1])


def training(model: nn.Module, train: TensorDataset, test: TensorDataset, lr: float) -> carpool.Training:
    """SGD with momentum, evaluated by accuracy."""
    inputs, labels = test.tensors

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        dataset=train,
        loss=loss,
        batch_size=32,
        stop=carpool.Stop(epochs=1),
        evaluate=evaluate,
    )


def cifar(samples: int = 2000, tests: int = 1000, channels: int = 8) -> carpool.Training:
    """A small CNN without BatchNorm on the first pictures."""
    data = carpool.datasets.cifar10(DATA / "cifar10" / "cifar10_jpeg.npz")
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * 64, 10),
    )
    return training(model, _first(data.train, samples), _first(data.test, tests), 0.02)


def digits(hidden: int = 64) -> carpool.Training:
    """A perceptron."""
    data = carpool.datasets.digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return training(model, _first(data.train, 10_000), _first(data.test, 10_000), 0.05)


def characters(samples: int = 8000, tests: int = 4000, length: int = 4, hidden: int = 64) -> carpool.Training:
    """The next character of a play."""
    found = min((DATA / "tinyshakespeare").glob("*.txt"))
    text = found.read_text(encoding="utf-8")[:200_000]
    known = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    stream = torch.tensor([known[symbol] for symbol in text])
    windows = stream.unfold(0, length + 1, length)
    inputs, labels = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    train = TensorDataset(inputs[:samples], labels[:samples])
    test = TensorDataset(inputs[-tests:], labels[-tests:])
    return training(Context(length, len(known), hidden), train, test, 0.1)


def _first(data: Any, count: int) -> TensorDataset:
    """The first samples of a dataset as tensors."""
    rows = [data[number] for number in range(min(count, len(data)))]
    images = torch.stack([torch.as_tensor(row[0]) for row in rows])
    return TensorDataset(images, torch.tensor([int(row[1]) for row in rows]))
