"""Graph verification: compares tensors, random state and optimizer state of replayed and eager steps.

A graph repeats what ran on the device, nothing that ran in Python. So state that Python changes in a step (host random
generators, counters that are plain numbers) is detected, and tensors are compared bitwise with an eager step from the
same state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.runtime.data.nested import map_leaves, nested_tensors
from carpool.runtime.engine.flat_buffers import as_real, differ

_TOLERANCE = 1e-2  # relative, where operations are not deterministic


def host_rng_state(device: torch.device) -> tuple[Any, ...]:
    """The state of all generators except the device's own; unequal after any draw."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state that users draw from
    inner = numpy_state["state"]
    return (
        random.getstate(),
        inner["key"].tobytes(),
        inner["pos"],
        numpy_state["has_gauss"],
        b"" if device.type == "cpu" else torch.default_generator.get_state().numpy().tobytes(),
    )


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clone tensors with their memory format."""
    return [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in tensors]


@torch.no_grad()
def tensors_equal(left: Sequence[Tensor], right: Sequence[Tensor], *, tolerant: bool = False) -> bool:
    """Whether two lists of tensors are bitwise equal, or with ``tolerant`` close in the norm of all together.

    Not each by itself: a gradient that is zero except for rounding (of a bias before BatchNorm) has any relative error.
    """
    if [(tensor.shape, tensor.dtype) for tensor in left] != [(tensor.shape, tensor.dtype) for tensor in right]:
        return False
    pairs = [(as_real(one), as_real(two)) for one, two in zip(left, right, strict=True)]
    if tolerant:
        pairs = [pair for pair in pairs if pair[0].is_floating_point()]
        distance = math.fsum(float(_distances(one, two).square().sum()) for one, two in pairs)
        norm = math.sqrt(math.fsum(float(two.double().nan_to_num(0, 0, 0).square().sum()) for _, two in pairs))
        return math.sqrt(distance) <= _TOLERANCE * norm
    flags = [differ(one, two).any() for one, two in pairs]
    return not flags or not bool(torch.stack([flag.to(flags[0].device) for flag in flags]).any())


def _distances(one: Tensor, two: Tensor) -> Tensor:
    """Absolute differences, 0 where both are the same infinity or both NaN."""
    same = ~differ(one, two)
    return (one.double() - two.double()).abs().masked_fill(same, 0.0).nan_to_num(math.inf)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state, in a fixed order."""
    return [tensor for state in _parameter_states(optimizer) for tensor in nested_tensors(state)]


def optimizer_scalars(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The rest of an optimizer's state: a step that changes it cannot be captured."""

    def value(leaf: Any) -> Any:
        return Tensor if isinstance(leaf, Tensor) else leaf

    return [map_leaves(state, value) for state in _parameter_states(optimizer)]


def _parameter_states(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                yield optimizer.state[parameter]


class OptimizerOptions:
    """The options of an optimizer's parameter groups: plain ones by value, tensors by identity."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._options = [
            [(name, value) for name, value in group.items() if name != "params"] for group in optimizer.param_groups
        ]

    def are_same_as(self, other: OptimizerOptions) -> bool:
        return len(self._options) == len(other._options) and all(
            len(mine) == len(theirs) and all(_is_same_option(a, b) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self._options, other._options, strict=True)
        )


def _is_same_option(one: tuple[str, Any], two: tuple[str, Any]) -> bool:
    if isinstance(one[1], Tensor) or isinstance(two[1], Tensor):
        return one[0] == two[0] and one[1] is two[1]
    return one == two
