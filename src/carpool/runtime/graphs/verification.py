"""Graph verification: compares tensors, random state and optimizer state of replayed and eager steps.

A recording repeats what was done on the device and nothing that was done in Python. So whatever Python changes in a
step (random numbers drawn on the host, a step counter that is a plain number) is looked for, and what the recording
computes is compared bit for bit with what the code computes from the same state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOOSE = 1e-2  # relative distance allowed where operations have no deterministic form


def host_rng_state(device: torch.device) -> tuple[Any, ...]:
    """Where the generators stand that are not the device's own; it compares unequal after any draw."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - it is the global state that users draw from
    inner = numpy_state["state"]
    return (
        random.getstate(),
        inner["key"].tobytes(),
        inner["pos"],
        numpy_state["has_gauss"],
        b"" if device.type == "cpu" else torch.default_generator.get_state().numpy().tobytes(),
    )


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as they are now."""
    return [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in tensors]


@torch.no_grad()
def tensors_equal(left: Sequence[Tensor], right: Sequence[Tensor], *, loosely: bool = False) -> bool:
    """Whether two rows of tensors agree bit for bit, or loosely: by the norm of all differences together.

    Not each by itself: what is zero but for rounding (the gradient of a bias before BatchNorm) differs as it likes.
    """
    if [(tensor.shape, tensor.dtype) for tensor in left] != [(tensor.shape, tensor.dtype) for tensor in right]:
        return False
    pairs = list(zip(left, right, strict=True))
    if loosely:
        pairs = [pair for pair in pairs if pair[0].is_floating_point()]
        apart = math.fsum(float((one.double() - two.double()).square().sum()) for one, two in pairs)
        return math.sqrt(apart) <= _LOOSE * math.sqrt(math.fsum(float(two.double().square().sum()) for _, two in pairs))
    unlike = [_unlike(one, two) for one, two in pairs]
    return not unlike or not bool(torch.stack([flag.to(unlike[0].device) for flag in unlike]).any())


def _unlike(one: Tensor, two: Tensor) -> Tensor:
    # Only what is not a number differs from itself; two of those may stand in the same place.
    unlike: Tensor = (one != two) & ~((one != one) & (two != two))
    return unlike.any()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that an optimizer remembers, in a fixed order."""
    return [
        tensor
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
        for tensor in _tensors(optimizer.state[parameter])
    ]


def optimizer_scalars(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything else that it remembers: if a step changes it, the step cannot be recorded."""
    return [
        _without_tensors(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    ]


class OptimizerOptions:
    """The options of an optimizer's groups: plain ones by value, tensors by being the same tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._options = [
            [(name, value) for name, value in group.items() if name != "params"] for group in optimizer.param_groups
        ]

    def are_same_as(self, other: OptimizerOptions) -> bool:
        """Whether these are the options that held then, too."""
        return len(self._options) == len(other._options) and all(
            len(mine) == len(theirs) and all(_is_same_option(a, b) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self._options, other._options, strict=True)
        )


def _is_same_option(one: tuple[str, Any], two: tuple[str, Any]) -> bool:
    if isinstance(one[1], Tensor) or isinstance(two[1], Tensor):
        return one[0] == two[0] and one[1] is two[1]
    return one == two


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, Mapping):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(part) for part in value]
    return value
