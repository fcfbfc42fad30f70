"""How a training is watched, as the profiler says it to the processes it starts; nothing heavy is imported here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

WATCHED, NOISE = "carpool.runtime.probe:watched", "carpool.runtime.probe:noise"


@dataclass(frozen=True, slots=True)
class Watching:
    """How a training is watched."""

    out: str  # folder for what is seen: one file for each process
    warmup: int  # steps before the first that counts
    steps: int
    limit_bytes: int = 0  # memory it may take; 0: any
    on_gpu: bool = False
    counts_blocks: bool = False  # memory in use, block by block, at the price of speed (see `map_blocks`)


def available_bytes() -> int:
    """What the machine can still give without paging."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
