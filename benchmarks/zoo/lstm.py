"""An LSTM language model (Zaremba and others, 2014: the medium one, about 20 M parameters at 10,000 words)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Word embedding, stacked LSTMs with dropout between them, and a linear layer over the vocabulary.

    The layers are separate: cuDNN's own dropout inside a stack keeps a random state of its own, which reseeding does
    not reach, so that a repeated step would differ.
    """

    def __init__(self, tokens: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.layers = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, tokens)
        for weight in (self.embedding.weight, self.output.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Any:
        """From (samples, length) token numbers to (samples, length, tokens) logits of the next one."""
        states = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            states = self.dropout(layer(states)[0])
        return self.output(states)


def lstm(*, tokens: int = 10_000, hidden: int = 650, layers: int = 2, dropout: float = 0.5) -> nn.Module:
    """LSTM language model."""
    return LanguageModel(tokens, hidden, layers, dropout)
