"""Captured step: static input batch, captured graphs and the tensors they touch, per batch signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from carpool.core.errors import CarpoolError
from carpool.runtime.data.batches import GatherBuffer
from carpool.runtime.graphs.capture import CapturedGraph
from carpool.runtime.graphs.verification import OptimizerOptions

BatchSignature = tuple[Any, ...]  # all of a batch but the values of its tensors

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class NonStaticBatch(CarpoolError):
    """A batch with something in it that cannot be given another value in place."""


def batch_signature(batch: Any) -> BatchSignature:
    """What two batches must have in common for one recording: structure, shapes, strides, types, plain values."""
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NonStaticBatch(f"a batch holds a tensor of layout {batch.layout}")
        return (Tensor, tuple(batch.shape), batch.stride(), batch.dtype, batch.device, batch.requires_grad)
    if isinstance(batch, Mapping):
        return (type(batch), *[(key, batch_signature(value)) for key, value in batch.items()])
    if isinstance(batch, list | tuple):
        return (type(batch), *[batch_signature(value) for value in batch])
    if isinstance(batch, _PLAIN):
        return (type(batch), batch)
    raise NonStaticBatch(f"a batch holds a {type(batch).__name__}")


def static_copy(batch: Any) -> Any:
    """A copy of a batch, to be filled with others of the same outline."""
    return _mapped(batch, _twin)


def fill_static(into: Any, batch: Any) -> None:
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


_PROOFS = 2  # steps made both ways before a recording is trusted


@dataclass(slots=True, eq=False)
class CapturedUpdate:
    """The recording of an update."""

    replay: CapturedGraph
    options: OptimizerOptions
    remembers: list[Tensor]  # held, because the recording has their addresses
    proofs: int = 0

    @property
    def is_proven(self) -> bool:
        """Whether it may stand for the code."""
        return self.proofs >= _PROOFS


@dataclass(slots=True, eq=False)
class CapturedStep:
    """The recordings for batches of one outline, and every tensor they touch."""

    batch: Any
    gathering: GatherBuffer | None  # how the batch comes about, where that is recorded too
    made: Tensor  # the loss on the device
    loss: Tensor  # on the host
    buffers: list[Tensor]
    before: list[Tensor]  # buffers as they were before the pass
    forward: CapturedGraph | None = None
    backward: CapturedGraph | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    proofs: int = 0
    update: CapturedUpdate | None = None

    @property
    def is_proven(self) -> bool:
        """Whether the pass may be replayed."""
        return self.proofs >= _PROOFS

    @property
    def is_proven_wholly(self) -> bool:
        """Whether the update may be replayed too."""
        return self.is_proven and self.update is not None and self.update.is_proven
