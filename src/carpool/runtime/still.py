"""Batches at fixed addresses: what a recorded pass reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from carpool.core.errors import CarpoolError

Outline = tuple[Any, ...]  # all of a batch but the values of its tensors

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NotStill(CarpoolError):
    """A batch with something in it that cannot be given another value in place."""


def outline(batch: Any) -> Outline:
    """What two batches must have in common for one recording: structure, shapes, strides, types, plain values."""
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NotStill(f"a batch holds a tensor of layout {batch.layout}")
        return (Tensor, tuple(batch.shape), batch.stride(), batch.dtype, batch.device, batch.requires_grad)
    if isinstance(batch, Mapping):
        return (type(batch), *[(key, outline(value)) for key, value in batch.items()])
    if isinstance(batch, list | tuple):
        return (type(batch), *[outline(value) for value in batch])
    if isinstance(batch, _PLAIN):
        return (type(batch), batch)
    raise NotStill(f"a batch holds a {type(batch).__name__}")


def still(batch: Any) -> Any:
    """A copy of a batch, to be filled with others of the same outline."""
    return _mapped(batch, _twin)


def fill(into: Any, batch: Any) -> None:
    """Copy the values of a batch into a still one."""
    pairs = zip(_tensors(into), _tensors(batch), strict=True)
    for target, source in pairs:
        if target is not source:
            target.copy_(source, non_blocking=True)


def _twin(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return twin.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _mapped(batch: Any, change: Any) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[_mapped(value, change) for value in batch])
    if isinstance(batch, list | tuple):
        return type(batch)([_mapped(value, change) for value in batch])
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, list | tuple):
        return [tensor for value in batch for tensor in _tensors(value)]
    return []
