"""The memory a worker takes: how much it was at most, and giving back what is only kept for later."""

from __future__ import annotations

import ctypes
import gc
import resource

import torch


def most_taken(device: torch.device) -> int:
    """Bytes that this process held at most so far: of the GPU's memory, or resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_room(device: torch.device) -> None:
    """Return to the device, or to the system, what the allocators hold without using it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # another C library has none
        trim(0)
