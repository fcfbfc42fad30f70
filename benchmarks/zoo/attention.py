"""Attention and the layer around it, for encoders and decoders; callers initialise the weights.

The product is written out: torch's fused kernels sum their gradients in any order, and bits could not be promised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.blocks import blank


class Attention(nn.Module):
    """Multi-head attention of queries over a memory."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (blank(nn.Linear, dim, dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Where ``hidden`` (broadcast to samples, heads, queries, keys) is true, a query does not look."""
        query, key, value = (
            layer(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.query, inputs), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = self.dropout(scores.softmax(-1)) @ value
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return result


def feed_forward(dim: int, inner: int, activation: nn.Module) -> nn.Sequential:
    """The two linear layers after attention."""
    return nn.Sequential(blank(nn.Linear, dim, inner), activation, blank(nn.Linear, inner, dim))


def later(length: int, device: torch.device) -> Tensor:
    """Which key comes after which query: what a decoder must not see."""
    places = torch.arange(length, device=device)
    return places[None, :] > places[:, None]
