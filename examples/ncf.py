"""Recommending: neural matrix factorisation on ratings that are made up from hidden tastes.

    carpool run examples/jobs.toml

For your own data replace `made_up_ratings`: all it gives is which items each user liked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import carpool


class NeuMF(nn.Module):
    """A product of factors and a perceptron, each with its own vectors for users and items."""

    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.product = nn.ModuleList([nn.Embedding(users, factors), nn.Embedding(items, factors)])
        self.deep = nn.ModuleList([nn.Embedding(users, 2 * factors), nn.Embedding(items, 2 * factors)])
        self.layers = nn.Sequential(
            nn.Linear(4 * factors, 2 * factors), nn.ReLU(), nn.Linear(2 * factors, factors), nn.ReLU()
        )
        self.output = nn.Linear(2 * factors, 1)
        for table in (*self.product, *self.deep):
            nn.init.normal_(table.weight, 0.0, 0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logit that a user likes an item."""
        product = self.product[0](users) * self.product[1](items)
        deep = self.layers(torch.cat((self.deep[0](users), self.deep[1](items)), dim=-1))
        score: Tensor = self.output(torch.cat((product, deep), dim=-1))
        return score.squeeze(-1)


def made_up_ratings(users: int, items: int, each: int) -> Tensor:
    """For every user the items liked, (users, each), in random order: those nearest to the user's taste."""
    dice = torch.Generator().manual_seed(1)
    tastes, traits = torch.randn(users, 3, generator=dice), torch.randn(items, 3, generator=dice)
    liked = (tastes @ traits.T).topk(each).indices
    return liked.gather(1, torch.rand(users, each, generator=dice).argsort(1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over pairs."""
    users, items, liked = batch
    return binary_cross_entropy_with_logits(model(users, items), liked)


def ncf(
    users: int = 400,
    items: int = 300,
    factors: int = 8,
    negatives: int = 4,
    batch_size: int = 1024,
    epochs: int = 20,
    lr: float = 0.02,
) -> carpool.Training:
    """For each item a user liked some others as examples of what not; one liked item per user is kept to judge by."""
    liked = made_up_ratings(users, items, each=20)
    kept, known = liked[:, 0], liked[:, 1:]
    dice = torch.Generator().manual_seed(2)
    who = torch.arange(users).repeat_interleave(known.shape[1])
    others = torch.randint(items, (len(who) * negatives,), generator=dice)
    train = carpool.datasets.TensorData(
        torch.cat((who, who.repeat_interleave(negatives))),
        torch.cat((known.flatten(), others)),
        torch.cat((torch.ones(len(who)), torch.zeros(len(others)))),
    )
    rivals = torch.cat((kept[:, None], torch.randint(items, (users, 99), generator=dice)), dim=1)
    model = NeuMF(users, items, factors)

    def evaluate(model: nn.Module) -> dict[str, float]:
        """How often the kept item is among the ten best of a hundred."""
        device = next(model.parameters()).device
        scores = model(torch.arange(users, device=device)[:, None].expand(-1, 100), rivals.to(device))
        return {"hit_rate": float(((scores > scores[:, :1]).sum(1) < 10).float().mean())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        dataset=train,
        loss=loss,
        batch_size=batch_size,
        stop=carpool.Stop(epochs=epochs, target_metric="hit_rate >= 0.9"),
        evaluate=evaluate,
        best="max hit_rate",
    )
