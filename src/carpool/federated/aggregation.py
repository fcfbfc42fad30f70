"""Server side of a round: how much each update counts, and the next weights (FedAvg, FedProx, FedAdam)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from carpool.federated.federation import Task
from carpool.federated.updates import Array, Weights


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The weights of a task after some rounds, and the state of its server optimizer."""

    weights: Weights
    trained: frozenset[str] = frozenset()  # arrays that a server optimizer may step; the others are averaged
    rounds: int = 0
    momentum: Weights = field(default_factory=dict)
    variance: Weights = field(default_factory=dict)


class Contribution(NamedTuple):
    """The figures of an accepted update that decide its weight."""

    volume: int  # samples its device holds of the task
    samples: int  # processed
    steps: float  # in a row; the mean over its runs


def contribution_weights(task: Task, updates: Sequence[Contribution]) -> tuple[float, ...]:
    """How much each update counts in the sum of differences to the round's weights.

    By ``samples``: its part of all samples. By ``data``: p_k, its part of the data. ``normalized``: p_k · τ/τ_k with
    τ_k its steps in a row and τ = Σ p_k τ_k, which is p_k if all make equally many steps.
    """
    if task.weighting == "samples":
        total = sum([update.samples for update in updates])
        return tuple([update.samples / total for update in updates])
    whole = sum([update.volume for update in updates])
    parts = [update.volume / whole for update in updates]
    if task.weighting == "data":
        return tuple(parts)
    steps = sum([part * update.steps for part, update in zip(parts, updates, strict=True)])
    return tuple([part * steps / update.steps for part, update in zip(parts, updates, strict=True)])


def next_model(task: Task, model: ServerModel, updates: Sequence[Weights], weights: Sequence[float]) -> ServerModel:
    """The model after a round of these updates with these weights.

    Sums are made in float64 in the given order, so that the result does not depend on the order of arrival. A single
    update of weight 1 becomes the next weights bit by bit.
    """
    mean = {name: _mean(value, [update[name] for update in updates], weights) for name, value in model.weights.items()}
    if task.algorithm != "fedadam":
        return ServerModel(as_types(mean, model.weights), model.trained, model.rounds + 1)
    first, second = task.betas
    momentum, variance = {}, {}
    for name in sorted(model.trained):
        old = model.weights[name].astype(np.float64)
        change = mean[name] - old
        momentum[name] = first * model.momentum.get(name, np.zeros_like(change)) + (1 - first) * change
        # Starts at ε², not at 0, as in the paper.
        before = model.variance.get(name, np.full_like(change, task.epsilon**2))
        variance[name] = second * before + (1 - second) * change * change
        mean[name] = old + task.server_lr * momentum[name] / (np.sqrt(variance[name]) + task.epsilon)
    return ServerModel(as_types(mean, model.weights), model.trained, model.rounds + 1, momentum, variance)


def _mean(old: Array, new: Sequence[Array], weights: Sequence[float]) -> Array:
    """Weighted sum of arrays, plus the old array, weighted so that all weights sum to 1."""
    if len(new) == 1 and weights[0] == 1.0:
        return new[0]
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    rest = 1.0 - sum(weights)
    total = old.astype(wide) * rest
    for array, weight in zip(new, weights, strict=True):
        total += array.astype(wide) * weight
    return total


def as_types(values: Mapping[str, Array], like: Weights) -> dict[str, Array]:
    """Values in the dtypes of the model; integers (counters) and flags are rounded."""
    found = {}
    for name, value in values.items():
        dtype = like[name].dtype
        if dtype.kind in "iub" and value.dtype != dtype:
            value = np.rint(value)
        found[name] = np.asarray(value.astype(dtype))
    return found
