"""Trainings as newcomers write them in plain PyTorch: no line of carpool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils.data import Dataset, TensorDataset


class Parts(NamedTuple):
    """What a script builds before its loop; with two optimizers the step is its own function."""

    model: nn.Module
    data: Dataset[Any]
    batch_size: int
    optimizer: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[Any, Any, Any], Tensor] | None = None


class Block(nn.Module):
    """A transformer block with a causal mask."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.second(x))
        return out


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, vocabulary: int = 96, width: int = 128, length: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, 4, length) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embedding(tokens) + self.places))
        return out


class Tagger(nn.Module):
    """An LSTM that classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Slow(Dataset[Any]):
    """Samples that come from a slow disk or network: each takes a while, without computing."""

    def __init__(self, samples: int, each_s: float) -> None:
        self.rows, self.each_s = torch.randn(samples, 64), each_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        time.sleep(self.each_s)
        return self.rows[place], place % 4


def classify(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of a batch of samples and classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt() -> Parts:
    """A small GPT with AdamW."""
    model = GPT()
    data = TensorDataset(torch.randint(0, 96, (512, 65)))

    def loss(net: Any, batch: Any) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Parts(model, data, 16, torch.optim.AdamW(model.parameters(), lr=3e-4), loss)


def cnn() -> Parts:
    """A convolutional net with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))
    data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
    return Parts(model, data, 32, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), classify)


def lstm() -> Parts:
    """An LSTM over sequences of 40."""
    model, data = Tagger(), TensorDataset(torch.randn(512, 40, 32), torch.randint(0, 5, (512,)))
    return Parts(model, data, 32, torch.optim.Adam(model.parameters(), lr=1e-3), classify)


def mlp(width: int = 256) -> Parts:
    """One setting of a sweep over widths of an MLP."""
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 4, (4096,)))
    return Parts(model, data, 64, torch.optim.Adam(model.parameters(), lr=1e-3), classify)


def wide() -> Parts:
    """Large matrices: computes on all cores that it gets, and reads much memory."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    data = TensorDataset(torch.randn(1024, 2048), torch.randint(0, 10, (1024,)))
    return Parts(model, data, 128, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), classify)


def slow() -> Parts:
    """An MLP whose samples take three milliseconds each to arrive."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    return Parts(model, Slow(256, 0.003), 16, torch.optim.Adam(model.parameters(), lr=1e-3), classify)


def gan() -> Parts:
    """Two networks with an optimizer each."""
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
    judge = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    model = nn.ModuleDict({"g": generator, "d": judge})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=2e-4) for name, part in model.items()}

    def step(net: Any, batch: Any, each: Any) -> Tensor:
        real = batch[0]
        fake = net["g"](torch.randn(len(real), 16, device=real.device))
        ones = torch.ones(len(real), 1, device=real.device)
        each["d"].zero_grad()
        found = net["d"](real), net["d"](fake.detach())
        judged = [F.binary_cross_entropy_with_logits(x, y) for x, y in zip(found, (ones, 0 * ones), strict=True)]
        torch.stack(judged).sum().backward()
        each["d"].step()
        each["g"].zero_grad()
        fooled: Tensor = F.binary_cross_entropy_with_logits(net["d"](fake), ones)
        fooled.backward()
        each["g"].step()
        return fooled

    return Parts(model, TensorDataset(torch.randn(4096, 64)), 64, optimizers, step=step)


ALL: dict[str, Callable[[], Parts]] = {
    "gpt": gpt,
    "cnn": cnn,
    "lstm": lstm,
    "wide": wide,
    "slow": slow,
    "gan": gan,
    "tiny": lambda: mlp(16),
    **{f"mlp{width}": (lambda width=width: mlp(width)) for width in (64, 128, 192, 256, 384, 512)},
}


def find(name: str) -> Parts:
    """A training by name; torchvision and transformers are imported for those that need them alone."""
    if name not in ALL:
        import library_parts

        return library_parts.ALL[name]()
    return ALL[name]()
