"""A language model: an LSTM that learns a text character by character.

    carpool run examples/jobs.toml

Give any UTF-8 text in the job file, `args = { path = "shakespeare.txt" }`; without one, sentences are made up here.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carpool


class CharacterModel(nn.Module):
    """Characters to vectors, an LSTM, vectors to the next character."""

    def __init__(self, characters: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the character after each one."""
        states, _ = self.lstm(self.dropout(self.embedding(text)))
        logits: Tensor = self.output(self.dropout(states))
        return logits


def made_up_text(sentences: int = 1500) -> str:
    """Sentences with a grammar that can be learned."""
    dice = random.Random(1)
    who = ["the old driver", "a young engineer", "my neighbour", "the first passenger", "a careful cyclist"]
    does = ["shares", "repairs", "follows", "remembers", "overtakes"]
    what = ["the red car", "an empty bus", "the shortest road", "every bridge", "a quiet street"]
    when = ["in the morning", "before noon", "every other day", "when it rains", "without a word"]
    picks = ([dice.choice(words) for words in (who, does, what, when)] for _ in range(sentences))
    return "".join(f"{' '.join(words).capitalize()}.\n" for words in picks)


def windows(text: str, alphabet: list[str], length: int) -> carpool.datasets.TensorData:
    """Pieces of the text, and the same pieces moved by one character."""
    number = {character: place for place, character in enumerate(alphabet)}
    stream = torch.tensor([number[character] for character in text])
    count = (len(stream) - 1) // length
    now, later = stream[: count * length], stream[1 : count * length + 1]
    return carpool.datasets.TensorData(now.view(count, length), later.view(count, length))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """All windows are equally long, so the mean over characters is the mean over samples."""
    text, following = batch
    return cross_entropy(model(text).flatten(0, 1), following.flatten())


def lstm(
    path: str = "",
    hidden: int = 128,
    length: int = 64,
    dropout: float = 0.1,
    batch_size: int = 32,
    epochs: int = 5,
    lr: float = 4e-3,
) -> carpool.Training:
    """The last tenth of the text is kept to judge by."""
    text = Path(path).read_text(encoding="utf-8") if path else made_up_text()
    alphabet = sorted(set(text))
    cut = len(text) * 9 // 10
    train, test = windows(text[:cut], alphabet, length), windows(text[cut:], alphabet, length)
    model = CharacterModel(len(alphabet), hidden, dropout)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        total = 0.0
        for now, later in test.batches(256):
            total += len(now) * float(loss(model, (now.to(device), later.to(device))))
        return {"perplexity": math.exp(total / len(test))}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        dataset=train,
        loss=loss,
        batch_size=batch_size,
        clip_norm=1.0,
        stop=carpool.Stop(epochs=epochs, target_metric="perplexity <= 1.2"),
        evaluate=evaluate,
        best="min perplexity",
    )
