"""Giving back memory that is only kept for later."""

from __future__ import annotations

import ctypes
import gc

import torch


def make_room(device: torch.device) -> None:
    """Return to the device, or to the system, what the allocators hold without using it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # another C library has none
        trim(0)
