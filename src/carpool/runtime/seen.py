"""What a process really sees of its GPU, against the lane it was started with.

A client of MPS that finds no daemon (it died a moment ago, or its pipes cannot be reached) gets no error: it computes
on the whole GPU. Nothing would tell but slower neighbours and other bits. So every process on a lane counts.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from carpool.runtime.lanes import WHOLE
from carpool.runtime.nvml import Nvml

_MPS_ENABLED = 133  # cuda.h: CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_GRAIN = 2  # multiprocessors that are given out together


class Seen(NamedTuple):
    """What a process sees."""

    multiprocessors: int
    whole: int | None = None  # that the GPU has; None: nobody tells
    is_client: bool | None = None  # of MPS; None: nobody tells


def look(device: torch.device) -> Seen:
    """Start CUDA, if it is not started, and look."""
    seen = torch.cuda.get_device_properties(device).multi_processor_count
    return Seen(int(seen), _whole(device), _is_client(device))


def lane_problem(asked: int, seen: Seen) -> str:
    """What is wrong with a lane of so many percent; empty if nothing is, or nothing can be said."""
    if seen.whole is None:
        is_wrong = seen.is_client is False
    else:
        is_wrong = seen.multiprocessors > seen.whole * asked // WHOLE + _GRAIN
    if asked >= WHOLE or not is_wrong:
        return ""
    there = "" if seen.whole is None else f" of {seen.whole}"
    return f"{asked} % were asked, {seen.multiprocessors}{there} multiprocessors are seen: NVIDIA's MPS was not found"


def lane_note(asked: int, device: torch.device, seen: Seen) -> str:
    """What was given, in words."""
    words = f"a lane of {asked} % on {device}: {seen.multiprocessors} multiprocessors seen"
    return f"{words}, without NVIDIA's MPS" if seen.is_client is False else words


def _whole(device: torch.device) -> int | None:
    nvml = Nvml.open()
    if nvml is None:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    places = [place for place in range(nvml.count()) if uuid and nvml.uuid(place).removeprefix("GPU-") == uuid]
    return nvml.multiprocessors(places[0]) if places else None


def _is_client(device: torch.device) -> bool | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    answer = ctypes.c_int()
    asked = driver.cuDeviceGetAttribute(ctypes.byref(answer), _MPS_ENABLED, ctypes.c_int(device.index or 0))
    return bool(answer.value) if asked == 0 else None
