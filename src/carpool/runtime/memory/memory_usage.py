"""Memory usage of a worker: footprint, peak, limits, release of cached memory.

On a GPU torch counts its allocations. On a CPU the kernel's resident set is read: its high-water mark, reset after the
warm-up, without file-backed and shared pages, minus what a worker has before its entry is called.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path

import torch

from carpool.core.units import format_bytes
from carpool.runtime.compat.allocator import release_freed_memory
from carpool.runtime.engine.trainer import Trainer

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): "reset the peak resident set size"


class MemoryFootprint:
    """Memory used since this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _status()["RssAnon"]

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # some containers forbid it; then the peak includes the warm-up
            _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")

    def peak_bytes(self) -> int:
        """Peak bytes of tensors since the reset, on a CPU including the allocator's cache; at least one page."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        now = _status()
        return max(now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._before, resource.getpagesize())

    def reserved_bytes(self) -> int:
        """Peak bytes that the allocator reserved on the device; on a CPU the same as `peak_bytes`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return self.peak_bytes()


def limit_memory(num_bytes: int, device: torch.device) -> None:
    """Limit the memory that this process may still allocate, so that it fails instead of its neighbours."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
        return
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, hard))


def tighten_limit(num_bytes: int, device: torch.device) -> None:
    """Lower torch's limit by memory allocated outside torch; negative raises it."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, fraction - num_bytes / total)), device)


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    rows = (line.split() for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated on the GPU, or resident on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_memory(device: torch.device) -> int:
    """Bytes that this process holds now: in tensors on the GPU, or resident on the host."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _status()["VmRSS"]


def process_limit(device: torch.device) -> str:
    """The limit on this process's memory on a host; empty: none, or the device is a GPU."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if device.type == "cuda" or soft == resource.RLIM_INFINITY:
        return ""
    return f"the limit of the process allows ({format_bytes(soft)} of address space: ulimit -v)"


class MemoryGrowth:
    """Distinguishes a leak from a batch that never fitted: compares the memory held after the first steps with now."""

    _WARMUP_STEPS = 3  # steps after which optimizer state and caches exist
    _FACTOR = 1.5  # growth from which it is called a leak

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._settled_bytes = 0

    def count_step(self) -> None:
        self._steps += 1
        if self._steps == self._WARMUP_STEPS:
            self._settled_bytes = current_memory(self._device)

    def description(self) -> str:
        """How memory grew; empty if it did not, or too few steps were made to know."""
        now = current_memory(self._device) if self._settled_bytes else 0
        if now <= self._FACTOR * max(self._settled_bytes, 1):
            return ""
        before, after = (f"{size / 2**20:.0f} MiB" for size in (self._settled_bytes, now))
        return (
            f"Memory grew from {before} after {self._WARMUP_STEPS} steps to {after} after {self._steps}: a leak. Keep "
            "numbers or detached tensors of a step (loss.item(), loss.detach()), not tensors with their graph."
        )


def has_free_memory(device: torch.device, most: int) -> bool:
    """Whether a GPU has 1.5 times `most` bytes free; the extra half is for the other jobs."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 1.5 * most


def release_memory(trainer: Trainer) -> None:
    """Free captured graphs and the allocator's cache."""
    for graphs in trainer.all_graphs:
        graphs.reset()  # they hold the memory of a whole pass
    gc.collect()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()
