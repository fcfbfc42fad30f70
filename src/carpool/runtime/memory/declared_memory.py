"""Declared memory: compares what jobs use with the `memory` and `ram` of their tables, and warns once per job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from carpool.core.model import JobId
from carpool.core.units import format_bytes
from carpool.jobs.program import Program

_MARGIN = 1.1  # on a declaration, for allocators and imports
_PROC = Path("/proc")
_KEPT = ("RssAnon:", "RssShmem:")  # of a process's status: its memory without pages mapped from files


class DeclaredMemory:
    """Finds jobs that use more memory than they declared."""

    def __init__(self) -> None:
        self._warned: set[JobId] = set()

    def is_of_interest(self, job: JobId, program: Program) -> bool:
        """Whether a job has declared memory and has not been warned about."""
        return bool(program.memory_bytes or program.ram_bytes) and job not in self._warned

    def warning(self, job: JobId, program: Program, used_bytes: int, num_devices: int, *, on_gpu: bool) -> str:
        """A warning if the job uses more than it declared for its devices; empty: it does not, or was warned about."""
        key, declared = ("ram", program.ram_bytes) if program.ram_bytes else ("memory", program.memory_bytes)
        if on_gpu and key == "memory":  # device memory: its allocator is limited
            return ""
        limit = declared * max(1, num_devices)
        if not limit or used_bytes <= _MARGIN * limit or job in self._warned:
            return ""
        self._warned.add(job)
        per = f" ({format_bytes(declared)} per device)" if num_devices > 1 else ""
        used = f"uses {format_bytes(used_bytes)} of RAM; it declared {key} = {format_bytes(limit)}{per}"
        return f"{used}. Jobs beside it may run out of memory: declare what it uses"


def resident_bytes(pids: Iterable[int], proc: Path = _PROC) -> int:
    """RAM of processes, without pages that they map from files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it has exited
            for line in (proc / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith(_KEPT):
                    total += int(line.split()[1]) << 10
    return total
