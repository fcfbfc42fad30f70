"""Memory usage of a worker: footprint, peak, limits, release of cached memory.

On a GPU torch counts every byte it takes. On a CPU nobody does, so the kernel's count of resident pages is read. Three
things would spoil it. Code and shared files are mapped page by page as they are first used: they are left out. Reading
twice and keeping the larger value would miss what is freed within a step: the kernel's own high-water mark is read,
after it was set back behind the warm-up. What a worker has before its entry is called is the same for every job: it is
subtracted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path

import torch

from carpool.runtime.compat.allocator import release_freed_memory
from carpool.runtime.engine.trainer import Trainer

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "reset the peak resident set size"


class MemoryFootprint:
    """Bytes above what this process had when the footprint was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _status()["RssAnon"]

    def reset_peak(self) -> None:
        """Forget the highest point so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # not every container lets it be written; then the warm-up counts as well
            _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")

    def peak_bytes(self) -> int:
        """The highest point since: what tensors took, on a CPU with what the allocator keeps beside them.

        A tiny training may take less than what was given back meanwhile; it is said to take a page.
        """
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        now = _status()
        return max(now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._before, resource.getpagesize())

    def reserved_bytes(self) -> int:
        """What the allocator has taken from the device at its highest; on a CPU the same as the peak."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return self.peak_bytes()


def limit_memory(num_bytes: int, device: torch.device) -> None:
    """Let this process have so many bytes more and no others: what does not fit fails here instead of next door."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / whole), device)
        return
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, hard))


def tighten_limit(num_bytes: int, device: torch.device) -> None:
    """Count so many bytes of a GPU more, or less, that torch has not allocated into the limit that it has."""
    whole = torch.cuda.get_device_properties(device).total_memory
    now = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, now - num_bytes / whole)), device)


def _status() -> dict[str, int]:
    """Sizes that the kernel tells of this process, in bytes."""
    rows = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def peak_memory(device: torch.device) -> int:
    """Bytes that this process held at most so far: of the GPU's memory, or resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def has_free_memory(device: torch.device, most: int) -> bool:
    """Whether a GPU has so many bytes free, and half as many for those who need more just now."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 1.5 * most


def release_memory(trainer: Trainer) -> None:
    """Return to the device, or to the system, what is only held for later: recordings, and what allocators keep."""
    if trainer.graphs is not None:
        trainer.graphs.forget()  # they hold a whole pass's memory
    gc.collect()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()
