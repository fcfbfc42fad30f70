"""Neural matrix factorisation (He and others, 2017): a generalised product and a perceptron over users and items."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class NeuMF(nn.Module):
    """Two embeddings for each user and each item: one pair is multiplied, the other goes through a perceptron."""

    def __init__(self, users: int, items: int, factors: int, layers: Sequence[int]) -> None:
        super().__init__()
        first = layers[0] // 2
        self.user_product, self.item_product = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_deep, self.item_deep = nn.Embedding(users, first), nn.Embedding(items, first)
        steps = itertools.pairwise(layers)
        self.deep = nn.Sequential(*[layer for a, b in steps for layer in (nn.Linear(a, b), nn.ReLU())])
        self.output = nn.Linear(factors + layers[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.05)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logit that a user likes an item, for each pair."""
        product = self.user_product(users) * self.item_product(items)
        deep = self.deep(torch.cat((self.user_deep(users), self.item_deep(items)), dim=-1))
        score: Tensor = self.output(torch.cat((product, deep), dim=-1))
        return score.squeeze(-1)


def ncf(
    *, users: int = 6040, items: int = 3706, factors: int = 8, layers: Sequence[int] = (64, 32, 16, 8)
) -> nn.Module:
    """NeuMF; the default sizes are those of MovieLens-1M."""
    return NeuMF(users, items, factors, layers)
