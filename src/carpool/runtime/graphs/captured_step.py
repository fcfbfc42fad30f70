"""Captured step: static input batch, captured graphs and the tensors they touch, per batch signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from carpool.core.errors import CarpoolError
from carpool.runtime.data.batches import GatherBuffer
from carpool.runtime.data.nested import map_leaves, nested_tensors
from carpool.runtime.errors import TrainingError
from carpool.runtime.graphs.capture import CapturedGraph
from carpool.runtime.graphs.verification import OptimizerOptions

BatchSignature = tuple[Any, ...]  # everything of a batch except the values of its tensors

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CHECKS = 2  # steps run both ways before a graph replaces eager execution


class NonStaticBatch(CarpoolError):
    """A batch contains a value that cannot be overwritten in place."""


def batch_signature(batch: Any) -> BatchSignature:
    """The properties that batches replayed by one graph share: structure, shapes, strides, dtypes, plain values."""
    if isinstance(batch, Tensor):
        if batch.layout is not torch.strided:
            raise NonStaticBatch(f"a batch contains a tensor of layout {batch.layout}")
        return (Tensor, tuple(batch.shape), batch.stride(), batch.dtype, batch.device, batch.requires_grad)
    if isinstance(batch, Mapping):
        return (type(batch), *[(key, batch_signature(value)) for key, value in batch.items()])
    if isinstance(batch, list | tuple):
        return (type(batch), *[batch_signature(value) for value in batch])
    if isinstance(batch, _PLAIN):
        return (type(batch), batch)
    raise NonStaticBatch(f"a batch contains a {type(batch).__name__}")


def static_copy(batch: Any) -> Any:
    """Copy a batch, to be overwritten by others of the same signature."""
    return map_leaves(batch, _clone_strided)


def fill_static(target: Any, batch: Any) -> None:
    """Copy the values of a batch into a static one."""
    for static, tensor in zip(nested_tensors(target), nested_tensors(batch), strict=True):
        if static is not tensor:
            static.copy_(tensor, non_blocking=True)


def static_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metrics that a graph writes; `TrainingError` for a number, which it would not update."""
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise TrainingError(f"the metric {name!r} is a number: return a tensor, which a graph can write")
    return metrics


def _clone_strided(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    clone = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return clone.copy_(leaf.detach()).requires_grad_(leaf.requires_grad)


@dataclass(slots=True, eq=False)
class CapturedUpdate:
    """The graph of an optimizer step."""

    replay: CapturedGraph
    options: OptimizerOptions
    state: list[Tensor]  # optimizer state: kept alive, because the graph has its addresses
    checks_passed: int = 0

    @property
    def is_verified(self) -> bool:
        return self.checks_passed >= _CHECKS


@dataclass(slots=True, eq=False)
class CapturedStep:
    """The graphs for batches of one signature, and every tensor they touch."""

    batch: Any
    gather: GatherBuffer | None  # set if the graph gathers the batch itself
    device_loss: Tensor
    host_loss: Tensor
    buffers: list[Tensor]
    buffers_before: list[Tensor]  # contents before the pass
    forward: CapturedGraph | None = None
    backward: CapturedGraph | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    metrics: Mapping[str, Any] = field(default_factory=dict)  # tensors that the forward graph writes
    checks_passed: int = 0
    update: CapturedUpdate | None = None

    @property
    def is_verified(self) -> bool:
        return self.checks_passed >= _CHECKS

    @property
    def is_fully_verified(self) -> bool:
        return self.is_verified and self.update is not None and self.update.is_verified
