"""Measures copy rates between pinned memory and the GPU."""

from __future__ import annotations

import time

import torch

_BYTES = 1 << 30
_REPEATS = 5


def copy_rates() -> dict[str, float]:
    """Bytes per second each way, the median of a few copies of a gigabyte; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    found = {"in": _rate(there, host), "out": _rate(host, there)}
    del host, there
    torch.cuda.empty_cache()
    return found


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    took = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return _BYTES / sorted(took)[_REPEATS // 2]
