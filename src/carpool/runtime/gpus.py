"""The GPUs this process may use, found without starting CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_BRAND = re.compile(r"^(NVIDIA|Tesla|GeForce|Quadro)\s+")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as CUDA will number it in a process of ours."""

    index: int
    model: str  # without the maker's name: H200, V100-SXM2-16GB
    memory_bytes: int = 0
    uuid: str = ""
    outsiders: tuple[int, ...] = ()  # processes that compute on it and are not ours
    taken_bytes: int = 0  # memory they hold

    @property
    def left_bytes(self) -> int:
        """Memory that is left for us; 0: unknown."""
        return max(1, self.memory_bytes - self.taken_bytes) if self.memory_bytes else 0


IsOurs = Callable[[int], bool]  # whether a process is one of ours


def number_as_listed() -> None:
    """Let CUDA number GPUs as the driver lists them, here and in processes to come; by itself it puts fast ones first.

    Before CUDA starts.
    """
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def list_gpus(is_ours: IsOurs = lambda pid: False) -> list[Gpu]:
    """What the driver lists and CUDA_VISIBLE_DEVICES lets through; nothing where there is no driver."""
    number_as_listed()
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return _by_torch()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = [_described(pynvml, place, is_ours) for place in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that CUDA will see, numbered as it will: it stops at the first name it does not know."""
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        found = next((gpu for gpu in gpus if _is_named(gpu, name)), None)
        if found is None:
            break
        chosen.append(replace(found, index=len(chosen)))
    return chosen


def names_of(places: Iterable[int], setting: str | None) -> list[str]:
    """What GPUs that this process numbers so are called in a process of its own: by the names they were given to us."""
    names = None if setting is None else [part.strip() for part in setting.split(",") if part.strip()]
    return [str(place) if names is None else names[place] for place in places]


def short_model(name: str) -> str:
    """A model's name as one word without its maker: ``NVIDIA H200`` is ``H200``."""
    while (shorter := _BRAND.sub("", name)) != name:
        name = shorter
    return re.sub(r"[^\w.\-]+", "-", name.strip())


def _is_named(gpu: Gpu, name: str) -> bool:
    return gpu.index == int(name) if name.isdecimal() else bool(gpu.uuid) and gpu.uuid.startswith(name)


def _described(pynvml: Any, place: int, is_ours: IsOurs) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(place)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    name, uuid = (text.decode() if isinstance(text, bytes) else text for text in (name, uuid))
    memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # not every driver tells
        processes = []
    others = [each for each in processes if not is_ours(int(each.pid))]
    taken = sum(int(other.usedGpuMemory or 0) for other in others)  # None where the driver hides it
    return Gpu(place, short_model(name), memory_bytes, uuid, tuple(int(other.pid) for other in others), taken)


def _by_torch() -> list[Gpu]:
    """Where nvidia-ml-py is missing; torch starts CUDA for this, which is harmless in a process that forks nobody."""
    try:
        import torch
    except ImportError:
        return []
    gpus = []
    for place in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(place)
        gpus.append(Gpu(place, short_model(told.name), int(told.total_memory)))
    return gpus
