"""Copying many small tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def put(into: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    """Give tensors these contents, those of one type together.

    On a GPU torch copies a row of one type with a few kernels, and a row in which types are mixed one by one; in a
    recording each of those copies is a node of its own. Before types were told apart, recorded steps on an H200 took
    5 to 8 µs longer for each buffer (floats and counts of BatchNorm layers) than without the copy: 0.9 ms of 4.5 ms for
    a MobileNetV3.
    """
    for targets, sources in by_type(into, contents):
        torch._foreach_copy_(targets, sources)


def by_type(into: Sequence[Tensor], contents: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Tensors and what goes into them, row by row of one type."""
    rows: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(into, contents, strict=True):
        targets, sources = rows.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return list(rows.values())
