"""Profile sweep: the settings to measure and the configuration of the probing workers; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice

PROBE_ENTRY, NOISE_ENTRY = "carpool.runtime.profiling.probe:watched", "carpool.runtime.profiling.probe:noise"


@dataclass(frozen=True, slots=True)
class ProbeConfig:
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


# Not every combination: batch sizes are varied on one device of each kind, and everything else (more devices, shares, a
# neighbour, exact) at the training's own batch. So the number of measurements is a sum and not a product.


_SMALLER, _LARGER = 3, 2  # doublings below and above the training's own batch


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One thing to measure."""

    devices: tuple[LocalDevice, ...]  # of one kind
    batch_size: int
    share: float = 1.0
    exact: bool = False
    is_paired: bool = False

    def __str__(self) -> str:
        words = [f"batch {self.batch_size} on {', '.join(device.name for device in self.devices)}"]
        words += [f"at {self.share:.0%}"] if self.share < 1.0 else []
        words += ["exact"] if self.exact else []
        words += ["with a neighbour"] if self.is_paired else []
        return " ".join(words)


def default_batches(own: int, num_samples: int) -> tuple[int, ...]:
    """Powers of two around the training's own batch, as far as the data reach."""
    around = {max(1, int(own * 2.0**power)) for power in range(-_SMALLER, _LARGER + 1)}
    return tuple(sorted(batch for batch in around | {own} if batch <= num_samples))


def check_batches(batches: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """The batches asked for; InputError where one is larger than the data."""
    for batch in batches:
        if not 1 <= batch <= num_samples:
            raise InputError(
                f"batch {batch}; the data holds {num_samples} samples",
                where="--batches",
                way_out=f"Give batch sizes from 1 to {num_samples}.",
            )
    return tuple(sorted(set(batches)))


def settings(
    devices: Sequence[LocalDevice],
    own: int,
    batches: Sequence[int],
    shares: Sequence[float],
    *,
    exact: bool = True,
    paired: bool = False,
) -> list[SweepPoint]:
    """All there is to measure, batch sizes ascending: where one does not fit the larger ones need not be tried."""
    found: list[SweepPoint] = []
    kinds = [tuple(run) for _, run in groupby(sorted(devices, key=lambda d: (d.kind, d.id)), key=lambda d: d.kind)]
    for alike in kinds:
        one = alike[:1]
        found += [SweepPoint(one, batch) for batch in sorted({own, *batches})]
        found += [SweepPoint(alike[:count], own) for count in widths(len(alike), own)]
        found += [SweepPoint(one, own, share) for share in shares if share < 1.0]
        if paired:
            found += [SweepPoint(one, own, share, is_paired=True) for share in shares]
        if exact:
            found.append(SweepPoint(one, own, exact=True))
    return found


def widths(most: int, batch: int) -> list[int]:
    """2, 4, 8 … and all there are, as far as every device gets two samples."""
    found = []
    count = 2
    while count < most:
        found.append(count)
        count *= 2
    return [count for count in (*found, most) if count > 1 and 2 * count <= batch]
