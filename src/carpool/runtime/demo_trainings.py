"""Entries of ``carpool demo``: four small trainings on bundled or synthetic data, and a plain loop for each.

``python -m carpool.runtime.demo_trainings '{"jobs": ["mlp"], "device": "cpu", "threads": 1, "epochs": null}'``
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from carpool.runtime.data.datasets import Split, accuracy, digits, synthetic
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training


def mlp(epochs: int = 25) -> Training:
    """Train a three-layer perceptron on handwritten digits."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return _training(model, optimizer, digits(), 32, epochs)


def cnn(epochs: int = 12) -> Training:
    """Train a small CNN with dropout on handwritten digits."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(1024, 10)),
    )
    return _training(model, torch.optim.Adam(model.parameters(), lr=1e-3), digits(), 32, epochs)


def resnet(epochs: int = 6) -> Training:
    """Train a residual network with batch normalization on synthetic color images."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Residual(16, 16), Residual(16, 32), Residual(32, 64)),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return _training(model, optimizer, synthetic((3, 16, 16), size=1024), 32, epochs)


def transformer(epochs: int = 10) -> Training:
    """Train a small transformer on the rows of handwritten digits."""
    model = RowTransformer(width=64, depth=2)
    return _training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), digits(), 32, epochs)


class Residual(nn.Module):
    """Residual block of two convolutions; halves the resolution when it widens."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.short_cut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.short_cut(images))


class RowTransformer(nn.Module):
    """Transformer that reads the rows of an 8×8 image as a sequence."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.squeeze(1)) + self.place
        return torch.as_tensor(self.head(self.layers(rows).mean(1)))


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Split, batch_size: int, epochs: int
) -> Training:
    return Training(
        model=model,
        optimizer=optimizer,
        dataset=data.train,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        stop=Stop(epochs=epochs),
        evaluate=lambda model: {"accuracy": accuracy(model, data.test)},
        evaluate_every=epochs,
    )


def train_by_hand(
    jobs: Sequence[str], device: str, threads: int, epochs: int | None, limits_s: Mapping[str, float]
) -> None:
    """Train jobs as a script would: tensors on the device, shuffled batches, torch's own kernels and threads.

    It begins when it reads a line, and prints the seconds that each job took. A job that exceeds its limit is ended.
    """
    torch.set_num_threads(threads)
    torch.zeros(1, device=device)  # starts CUDA
    _say({"ready": True})
    sys.stdin.readline()
    for job in jobs:
        started = time.monotonic()
        torch.manual_seed(0)
        training = globals()[job](**({} if epochs is None else {"epochs": epochs}))
        _train(training, device, started + limits_s.get(job, float("inf")))
        _say({"job": job, "seconds": time.monotonic() - started})


def _train(training: Training, device: str, until: float) -> None:
    model, data = training.model.to(device), training.dataset.to(device)
    assert training.loss is not None
    assert training.evaluate is not None
    assert training.stop.epochs is not None
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    for _ in range(training.stop.epochs):
        order = torch.randperm(len(data), device=device)
        for start in range(0, len(order), training.batch_size):
            loss = training.loss(model, data.batch(order[start : start + training.batch_size]))
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            if time.monotonic() > until:
                return
    model.eval()
    training.evaluate(model)


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train_by_hand(**json.loads(sys.argv[1]))
