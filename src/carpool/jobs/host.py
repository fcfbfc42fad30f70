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
    """Cores that may be used, RAM there is, and what is left of the disk that `folder` is or will be on.

    A container's limits count where they are lower (cgroup v2: ``cpu.max``, ``memory.max``).
    """
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _first_line(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, ceil(int(quota) / int(period)))
    limit = _first_line(cgroup / "memory.max")
    amounts = [_total(meminfo), *([int(limit)] if limit.isdecimal() else [])]
    return HostResources(cores, min(filter(None, amounts), default=0), shutil.disk_usage(_existing(folder)).free)


def _total(meminfo: Path) -> int:
    """Bytes of RAM; 0 where nobody says."""
    words = _first_line(meminfo).split()  # MemTotal: 16384 kB
    return int(words[1]) << 10 if len(words) > 1 and words[0] == "MemTotal:" else 0


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


class CoreAllocator:
    """Cores of this machine, given out to processes that asked for a number of them."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        self._given: dict[Hashable, tuple[int, ...]] = {}

    def claim(self, who: Hashable, count: int) -> tuple[int, ...]:
        """As many cores, those with the fewest claims first; none where none were asked for: then all may be used."""
        self.let_go(who)
        if not count:
            return ()
        claims = [core for given in self._given.values() for core in given]
        chosen = sorted(self._cores, key=lambda core: (claims.count(core), core))[:count]
        self._given[who] = tuple(sorted(chosen))
        return self._given[who]

    def let_go(self, who: Hashable) -> None:
        """Somebody is gone, or never had any."""
        self._given.pop(who, None)
