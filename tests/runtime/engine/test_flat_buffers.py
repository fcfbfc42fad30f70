"""Tensors are copied with one call per dtype: for mixed dtypes torch launches one kernel per tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from carpool.runtime.compat.torch_api import foreach_copy_
from carpool.runtime.engine import flat_buffers
from carpool.runtime.engine.flat_buffers import copy_tensors


def test_tensors_are_copied() -> None:
    wanted = [torch.tensor([1.5, 2.5]), torch.tensor(3), torch.tensor([[4.0]]), torch.tensor(5)]
    row = [torch.zeros_like(tensor) for tensor in wanted]
    copy_tensors(row, wanted)
    assert all(torch.equal(one, other) for one, other in zip(row, wanted, strict=True))


def test_each_copy_has_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[torch.dtype]] = []

    def recorded(targets: Any, sources: Any) -> None:
        seen.append({tensor.dtype for tensor in (*targets, *sources)})
        foreach_copy_(targets, sources)

    monkeypatch.setattr(flat_buffers, "foreach_copy_", recorded)
    row = [torch.zeros(2), torch.zeros((), dtype=torch.int64)] * 3
    copy_tensors(row, [tensor.clone() for tensor in row])
    assert seen == [{torch.float32}, {torch.int64}]


def test_copying_nothing() -> None:
    copy_tensors([], [])
