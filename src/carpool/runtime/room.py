"""The memory a worker takes: how much it was at most, and giving back what is only kept for later."""

from __future__ import annotations

import gc
import resource

import torch

from carpool.runtime.allocator import give_freed_memory_back
from carpool.runtime.trainer import Trainer


def most_taken(device: torch.device) -> int:
    """Bytes that this process held at most so far: of the GPU's memory, or resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def has_free(device: torch.device, most: int) -> bool:
    """Whether a GPU has so many bytes free, and half as many for those who need more just now."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 1.5 * most


def make_room(trainer: Trainer) -> None:
    """Return to the device, or to the system, what is only held for later: recordings, and what allocators keep."""
    if trainer.graphs is not None:
        trainer.graphs.forget()  # they hold a whole pass's memory
    gc.collect()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_freed_memory_back()
