"""What this machine has besides its devices, as far as this process may use it: cores, RAM and disk."""

from __future__ import annotations

import os
import shutil
from math import ceil
from pathlib import Path

from carpool.core.supplies import Supplies

_CGROUP = Path("/sys/fs/cgroup")


def supplies_here(folder: Path, *, cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> Supplies:
    """Cores that may be used, RAM there is, and what is left of the disk that `folder` is or will be on.

    A container's limits count where they are lower (cgroup v2: ``cpu.max``, ``memory.max``).
    """
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _first_line(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, ceil(int(quota) / int(period)))
    limit = _first_line(cgroup / "memory.max")
    amounts = [_total(meminfo), *([int(limit)] if limit.isdecimal() else [])]
    return Supplies(cores, min(filter(None, amounts), default=0), shutil.disk_usage(_existing(folder)).free)


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
