"""Nets over the nodes of a graph: GCN, FastGCN and GraphSAGE. A sample is a node; the graph goes with every batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Graph:
    """A graph as tensors of fixed shapes; what is asked for on a device is copied there once.

    ``weights`` is the dense Â = D^-½ (A + I) D^-½ of GCN: its product has one order of summing, which scattered sums
    over edges do not have. ``near`` are each node's neighbours, itself among them, for sampling.
    """

    def __init__(self, features: Tensor, weights: Tensor, near: Tensor, degree: Tensor) -> None:
        self.features = features  # (nodes, features)
        self.weights = weights  # (nodes, nodes)
        self.near = near  # (nodes, most neighbours)
        self.degree = degree  # (nodes), neighbours that count
        self.mixed = weights @ features  # FastGCN's first layer looks at all neighbours, once and for all
        chance = weights.square().sum(0)
        self.chance = chance / chance.sum()  # of each node to be drawn for a layer: q ∝ ‖Â(:, u)‖²
        self.reach = self.chance.cumsum(0)  # here and not in each step: on a GPU it has no deterministic form
        self._on: dict[torch.device, Graph] = {features.device: self}

    @classmethod
    def of(cls, features: Tensor, edges: Tensor, most: int = 32) -> Graph:
        """From (2, edges) node numbers, read in both directions; a node keeps ``most`` neighbours for sampling."""
        count = len(features)
        linked = torch.zeros(count, count)
        linked[edges[0], edges[1]] = linked[edges[1], edges[0]] = 1.0
        linked.fill_diagonal_(1.0)
        scale = linked.sum(1).rsqrt()
        order = linked.argsort(dim=1, descending=True, stable=True)[:, :most]
        return cls(features, scale[:, None] * linked * scale, order, linked.sum(1).long().clamp(max=most))

    def to(self, device: str | torch.device) -> Graph:
        """The same graph on a device."""
        place = torch.device(device)
        if place not in self._on:
            moved = Graph.__new__(Graph)
            for name in ("features", "weights", "near", "degree", "mixed", "chance", "reach"):
                setattr(moved, name, getattr(self, name).to(place))
            moved._on = self._on
            self._on[place] = moved
        return self._on[place]


class NodeBatch(NamedTuple):
    """Some nodes with their classes, and the graph they live in."""

    nodes: Tensor
    labels: Tensor
    graph: Graph


class NodeData:
    """Labelled nodes as samples."""

    def __init__(self, graph: Graph, nodes: Tensor, labels: Tensor) -> None:
        self.graph = graph
        self.nodes = nodes
        self.labels = labels  # of all nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def batch(self, samples: Tensor) -> NodeBatch:
        """The nodes with these numbers."""
        nodes = self.nodes[samples]
        return NodeBatch(nodes, self.labels[nodes], self.graph)


class GCN(nn.Module):
    """Graph convolutions (Kipf and Welling, 2016) over the whole graph: Â · relu(Â · X · W₀ + b₀) · W₁ + b₁."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Logits of the nodes."""
        products = nn.functional.linear(self.dropout(graph.features), self.first.weight)
        states = self.dropout(torch.relu(graph.weights @ products + self.first.bias))
        # Only the rows that are asked for are mixed in the last layer.
        mixed: Tensor = graph.weights[nodes] @ states
        return nn.functional.linear(mixed, self.second.weight, self.second.bias)


class FastGCN(GCN):
    """GCN that looks at a drawn part of the hidden layer in training (Chen and others, 2018)."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float, drawn: int) -> None:
        super().__init__(features, hidden, classes, dropout)
        self.drawn = drawn

    def forward(self, graph: Graph, nodes: Tensor) -> Any:
        """Logits of the nodes: the mean over t drawn nodes u of Â(·, u) h(u) / q(u), all nodes when evaluating."""
        weights = graph.weights[nodes]
        mixed = graph.mixed
        if self.training:
            dice = torch.rand(self.drawn, device=nodes.device)
            drawn = torch.searchsorted(graph.reach, dice).clamp(max=len(graph.chance) - 1)
            weights = weights[:, drawn] / (graph.chance[drawn] * self.drawn)
            mixed = mixed[drawn]
        states = self.dropout(torch.relu(self.first(self.dropout(mixed))))
        return self.second(weights @ states)


class GraphSAGE(nn.Module):
    """Sample and aggregate (Hamilton and others, 2017): a node and the mean of drawn neighbours, two hops deep."""

    def __init__(self, features: int, hidden: int, classes: int, dropout: float, neighbours: tuple[int, int]) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.first, self.second = nn.Linear(2 * features, hidden), nn.Linear(2 * hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph: Graph, nodes: Tensor) -> Any:
        """Logits of the nodes."""
        near = self._draw(graph, nodes, self.neighbours[0])
        own = self._hop(graph, nodes)
        around = self._hop(graph, near).mean(-2)
        return self.second(torch.cat((own, around), dim=-1))

    def _hop(self, graph: Graph, nodes: Tensor) -> Tensor:
        around = graph.features[self._draw(graph, nodes, self.neighbours[1])].mean(-2)
        both = torch.cat((graph.features[nodes], around), dim=-1)
        states: Tensor = self.dropout(torch.relu(self.first(both)))
        return states

    def _draw(self, graph: Graph, nodes: Tensor, count: int) -> Tensor:
        """Some neighbours of each node, with repetition."""
        dice = torch.rand(*nodes.shape, count, device=nodes.device)
        degree = graph.degree[nodes].unsqueeze(-1)
        choice = torch.minimum((dice * degree).long(), degree - 1)
        return graph.near[nodes].gather(-1, choice)


def gcn(*, features: int = 1433, hidden: int = 16, classes: int = 7, dropout: float = 0.5) -> nn.Module:
    """GCN of two layers; the default sizes are those of Cora."""
    return GCN(features, hidden, classes, dropout)


def fastgcn(
    *, features: int = 1433, hidden: int = 16, classes: int = 7, dropout: float = 0.0, drawn: int = 400
) -> nn.Module:
    """FastGCN of two layers."""
    return FastGCN(features, hidden, classes, dropout, drawn)


def graphsage(
    *,
    features: int = 1433,
    hidden: int = 128,
    classes: int = 7,
    dropout: float = 0.0,
    neighbours: tuple[int, int] = (10, 10),
) -> nn.Module:
    """GraphSAGE of two layers with the mean aggregator."""
    near, far = neighbours
    return GraphSAGE(features, hidden, classes, dropout, (near, far))
