"""Nested batches: tensors in mappings, lists, tuples and named tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in a nested batch that is not a container."""
    if isinstance(batch, Mapping):
        return {key: map_leaves(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[map_leaves(value, change) for value in batch])
    if isinstance(batch, list | tuple):
        return type(batch)([map_leaves(value, change) for value in batch])
    return change(batch)


def nested_tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from nested_tensors(value)
