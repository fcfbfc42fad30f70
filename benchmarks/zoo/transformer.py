"""The Transformer (Vaswani and others, 2017): an encoder and a decoder that share one table of words.

Normalisation stands before attention and not behind the shortcut, as has become usual: it learns without warm-up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.attention import Attention, feed_forward, later
from zoo.blocks import blank
from zoo.drawing import draw, normal, xavier


class TransformerLayer(nn.Module):
    """Attention over itself, in a decoder over the encoder's output too, and feed-forward."""

    def __init__(self, dim: int, heads: int, inner: int, dropout: float, decodes: bool) -> None:
        super().__init__()
        self.inward = Attention(dim, heads, dropout)
        self.outward = Attention(dim, heads, dropout) if decodes else None
        self.feed_forward = feed_forward(dim, inner, nn.ReLU())
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if decodes else 2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, hidden: Tensor, memory: Tensor, memory_hidden: Tensor) -> Tensor:
        """One layer; an encoder's does not look at the memory."""
        normed = self.norms[0](states)
        states = states + self.dropout(self.inward(normed, normed, hidden))
        if self.outward is not None:
            states = states + self.dropout(self.outward(self.norms[2](states), memory, memory_hidden))
        result: Tensor = states + self.dropout(self.feed_forward(self.norms[1](states)))
        return result


class Translator(nn.Module):
    """From a sentence and the beginning of its translation to the next word."""

    def __init__(self, tokens: int, dim: int, layers: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.dim = dim
        self.words = blank(nn.Embedding, tokens, dim)
        self.encoder = nn.ModuleList(TransformerLayer(dim, heads, inner, dropout, decodes=False) for _ in range(layers))
        self.decoder = nn.ModuleList(TransformerLayer(dim, heads, inner, dropout, decodes=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        draw([(self.words.weight, normal(dim**-0.5)), *((each.weight, xavier(each.weight)) for each in linear)])
        for each in linear:
            nn.init.zeros_(each.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the word after each place of ``target``; 0 is padding."""
        padding = (source == 0)[:, None, None, :]
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory, padding, memory, padding)
        memory = self.norms[0](memory)
        states = self._embed(target)
        unseen = later(target.shape[1], target.device)
        for layer in self.decoder:
            states = layer(states, unseen, memory, padding)
        return nn.functional.linear(self.norms[1](states), self.words.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.words(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=states.dtype)
        powers = torch.arange(0, self.dim, 2, device=tokens.device, dtype=states.dtype) / self.dim
        angles = places[:, None] * torch.exp(-math.log(10_000.0) * powers)
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        result: Tensor = self.dropout(states * math.sqrt(self.dim) + waves)
        return result


def transformer(
    *,
    tokens: int = 37_000,
    dim: int = 512,
    layers: int = 6,
    heads: int = 8,
    inner: int = 2048,
    dropout: float = 0.1,
) -> nn.Module:
    """The base model of the paper."""
    return Translator(tokens, dim, layers, heads, inner, dropout)
