"""Optimizer set: several optimizers, each with parameters of its own, behind the interface of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


def optimizers_of(given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a training or of a set, in the order in which they step."""
    if isinstance(given, OptimizerSet):
        return given.parts
    if isinstance(given, torch.optim.Optimizer):
        return (given,)
    return tuple(given.values() if isinstance(given, Mapping) else given)


def combined(given: Optimizers) -> torch.optim.Optimizer:
    """One optimizer that stands for all."""
    return given if isinstance(given, torch.optim.Optimizer) else OptimizerSet(optimizers_of(given))


class OptimizerSet(torch.optim.Optimizer):
    """Steps several optimizers one after another; groups and state are those of its parts, not copies."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)  # the constructor of the base class would create groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        return _JoinedState(self.parts)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self.parts[-1].register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"OptimizerSet({', '.join(type(part).__name__ for part in self.parts)})"


class _JoinedState(Mapping[Tensor, Any]):
    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, parameter: Tensor) -> Any:
        for part in self._parts:
            if parameter in part.state:
                return part.state[parameter]
        raise KeyError(parameter)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for part in self._parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)
