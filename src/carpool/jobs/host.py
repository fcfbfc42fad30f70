"""Host resources: usable cores, RAM and disk of this machine, and core assignment to processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable, Sequence
from math import ceil
from pathlib import Path

from carpool.core.host_resources import HostResources

_CGROUP = Path("/sys/fs/cgroup")


def host_supplies(folder: Path, *, cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> HostResources:
    """Usable cores, RAM, and free space of the disk that holds `folder`.

    Lower limits of a container apply (cgroup v2: ``cpu.max``, ``memory.max``).
    """
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _first_line(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, ceil(int(quota) / int(period)))
    limit = _first_line(cgroup / "memory.max")
    amounts = [_total(meminfo), *([int(limit)] if limit.isdecimal() else [])]
    return HostResources(cores, min(filter(None, amounts), default=0), shutil.disk_usage(_existing(folder)).free)


def _total(meminfo: Path) -> int:
    """Bytes of RAM; 0: unknown."""
    words = _first_line(meminfo).split()  # MemTotal: 16384 kB
    return int(words[1]) << 10 if len(words) > 1 and words[0] == "MemTotal:" else 0


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


class CoreAllocator:
    """Assigns cores of this machine to processes that ask for a number of them."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        self._claimed: dict[Hashable, tuple[int, ...]] = {}

    def claim(self, process: Hashable, count: int) -> tuple[int, ...]:
        """`count` cores, those with the fewest claims first; none for a count of 0, which means any core."""
        self.release(process)
        if not count:
            return ()
        claims = [core for cores in self._claimed.values() for core in cores]
        chosen = sorted(self._cores, key=lambda core: (claims.count(core), core))[:count]
        self._claimed[process] = tuple(sorted(chosen))
        return self._claimed[process]

    def release(self, process: Hashable) -> None:
        self._claimed.pop(process, None)
