"""A graph network that sorts papers into fields by their words and by what they cite.

    carpool run examples/jobs.toml

Give a citation graph such as Cora as npz, `args = { path = "cora.npz" }`, with the arrays `x_data`, `x_indices`,
`x_indptr`, `x_shape` (words of each paper, compressed rows), `y` (its field), `edge_index` (2, citations), `train_idx`
and `test_idx`; without one, a graph is made up here. A sample is a paper, and a step sees all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import carpool


class Graph:
    """Words of all papers, and how much each paper hears of each other one.

    It goes with every batch; being asked for the same device again, it gives the same copy.
    """

    def __init__(self, words: Tensor, hears: Tensor) -> None:
        self.words, self.hears = words, hears
        self.copies: dict[torch.device, Graph] = {}

    def to(self, device: torch.device) -> Graph:
        """The graph on a device."""
        if device not in self.copies:
            self.copies[device] = Graph(self.words.to(device), self.hears.to(device))
        return self.copies[device]


class Papers(NamedTuple):
    """All that is known: a graph, the field of each paper, and which papers to learn from and to judge by."""

    graph: Graph
    fields: Tensor
    train: Tensor
    test: Tensor


class Samples:
    """Papers by number; a batch is (papers, their fields, graph)."""

    def __init__(self, papers: Papers, numbers: Tensor) -> None:
        self.papers, self.numbers = papers, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, samples: Tensor) -> tuple[Tensor, Tensor, Graph]:
        """Some of the papers."""
        chosen = self.numbers[samples]
        return chosen, self.papers.fields[chosen], self.papers.graph


class GraphNetwork(nn.Module):
    """Two graph convolutions: mix what the neighbours say, then a linear layer."""

    def __init__(self, words: int, hidden: int, fields: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(words, hidden), nn.Linear(hidden, fields)
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph: Graph, papers: Tensor) -> Tensor:
        """Logits of the fields of some papers."""
        states = torch.relu(graph.hears @ self.first(self.dropout(graph.words)))
        logits: Tensor = self.second(graph.hears[papers] @ self.dropout(states))
        return logits


def normalised(edges: Tensor, count: int) -> Tensor:
    """D^-½ (A + I) D^-½: everybody hears himself and his neighbours, the more of them the less of each."""
    linked = torch.eye(count)
    linked[edges[0], edges[1]] = linked[edges[1], edges[0]] = 1.0
    scale = linked.sum(1).rsqrt()
    return scale[:, None] * linked * scale


def read_papers(path: str) -> Papers:
    """A citation graph from an npz file."""
    with np.load(path) as arrays:
        count, width = (int(side) for side in arrays["x_shape"])
        words = torch.zeros(count, width)
        rows = np.repeat(np.arange(count), np.diff(arrays["x_indptr"]))
        words[torch.from_numpy(rows), torch.from_numpy(arrays["x_indices"].astype(np.int64))] = torch.from_numpy(
            arrays["x_data"]
        )
        edges, fields, train, test = (
            torch.from_numpy(arrays[name].astype(np.int64)) for name in ("edge_index", "y", "train_idx", "test_idx")
        )
    words /= words.sum(1, keepdim=True).clamp(min=1.0)
    return Papers(Graph(words, normalised(edges, count)), fields, train, test)


def made_up_papers(count: int = 600, width: int = 200, fields: int = 5) -> Papers:
    """Papers that mostly cite their own field and share a few of its words."""
    dice = torch.Generator().manual_seed(1)
    field = torch.randint(fields, (count,), generator=dice)
    typical = torch.rand(fields, width, generator=dice) < 0.1
    words = (torch.rand(count, width, generator=dice) < torch.where(typical[field], 0.12, 0.04)).float()
    words /= words.sum(1, keepdim=True).clamp(min=1.0)
    sides = torch.randint(count, (2, 6 * count), generator=dice)
    cited = (field[sides[0]] == field[sides[1]]) | (torch.rand(6 * count, generator=dice) < 0.1)
    graph = Graph(words, normalised(sides[:, cited], count))
    return Papers(graph, field, torch.arange(100), torch.arange(100, count))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the papers of the batch."""
    papers, fields, graph = batch
    return cross_entropy(model(graph, papers), fields)


def gcn(
    path: str = "", hidden: int = 16, dropout: float = 0.5, epochs: int = 120, lr: float = 0.02
) -> carpool.Training:
    """Every epoch is one step over all papers that are for training."""
    papers = read_papers(path) if path else made_up_papers()
    model = GraphNetwork(papers.graph.words.shape[1], hidden, int(papers.fields.max()) + 1, dropout)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        told = model(papers.graph.to(device), papers.test.to(device)).argmax(1).cpu()
        return {"accuracy": float((told == papers.fields[papers.test]).float().mean())}

    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4),
        dataset=Samples(papers, papers.train),
        loss=loss,
        batch_size=len(papers.train),
        stop=carpool.Stop(epochs=epochs, target_loss=0.05),
        evaluate=evaluate,
        evaluate_every=20,
        best="max accuracy",
    )
