"""BERT (Devlin and others, 2018) with a head that finds the answer to a question as a span of the text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.attention import Attention, feed_forward
from zoo.blocks import blank
from zoo.drawing import draw, normal


class BertLayer(nn.Module):
    """Attention and feed-forward, each with its normalisation behind the shortcut."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, dropout)
        self.feed_forward = feed_forward(dim, 4 * dim, nn.GELU())
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, hidden: Tensor) -> Tensor:
        """One layer."""
        states = self.norms[0](states + self.dropout(self.attention(states, states, hidden)))
        result: Tensor = self.norms[1](states + self.dropout(self.feed_forward(states)))
        return result


class SpanFinder(nn.Module):
    """An encoder over question and text, and two logits for each token: the answer begins, the answer ends here."""

    def __init__(self, tokens: int, dim: int, layers: int, heads: int, positions: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (blank(nn.Embedding, count, dim) for count in (tokens, positions, 2))
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(dim, heads, dropout) for _ in range(layers))
        self.span = nn.Linear(dim, 2)
        weighted = [module for module in self.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        draw((module.weight, normal(0.02)) for module in weighted)
        for module in weighted:
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        """From token numbers (0 is padding) and kinds (0 question, 1 text) to (samples, length, 2) logits.

        Padding cannot be chosen.
        """
        padding = tokens == 0
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.dropout(self.norm(self.words(tokens) + self.places(places) + self.kinds(kinds)))
        for layer in self.layers:
            states = layer(states, padding[:, None, None, :])
        logits: Tensor = self.span(states)
        return logits.masked_fill(padding[:, :, None], -1e4)


def bert(
    *,
    tokens: int = 30_522,
    dim: int = 768,
    layers: int = 12,
    heads: int = 12,
    positions: int = 512,
    dropout: float = 0.1,
) -> nn.Module:
    """BERT with a span head; the default sizes are those of BERT-base."""
    return SpanFinder(tokens, dim, layers, heads, positions, dropout)
