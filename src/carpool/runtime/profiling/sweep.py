"""Profile sweep: the settings to measure and the configuration of the probing workers; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice

PROBE_ENTRY = "carpool.runtime.profiling.probe:probed_training"
NOISE_ENTRY = "carpool.runtime.profiling.probe:measure_noise"
_HALVINGS, _DOUBLINGS = 3, 2  # of the training's own batch size


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """The configuration of a probing worker."""

    out: str  # folder for measurements: one file per process
    warmup: int  # steps that are not measured
    steps: int
    limit_bytes: int = 0  # of memory; 0: no limit
    on_gpu: bool = False
    exact_memory: bool = False  # measure memory exactly, but slowly (see `map_large_blocks`)


def available_bytes() -> int:
    """Memory available on this machine without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One setting to measure."""

    devices: tuple[LocalDevice, ...]  # of one device type
    batch_size: int
    share: float = 1.0
    exact: bool = False
    is_paired: bool = False

    def __str__(self) -> str:
        text = f"batch {self.batch_size} on {', '.join(device.name for device in self.devices)}"
        text += f" at {self.share:.0%}" if self.share < 1.0 else ""
        text += " exact" if self.exact else ""
        return f"{text} with a neighbour" if self.is_paired else text


def default_batches(own: int, num_samples: int) -> tuple[int, ...]:
    """The training's own batch size times powers of two, up to the size of the dataset."""
    around = {max(1, int(own * 2.0**power)) for power in range(-_HALVINGS, _DOUBLINGS + 1)}
    return tuple(sorted(batch for batch in around | {own} if batch <= num_samples))


def check_batches(batches: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Sort the requested batch sizes; `InputError` if one is larger than the dataset."""
    for batch in batches:
        if not 1 <= batch <= num_samples:
            raise InputError(
                f"batch {batch}; the dataset has {num_samples} samples",
                where="--batches",
                way_out=f"Use batch sizes from 1 to {num_samples}.",
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
    """All settings to measure, batch sizes ascending, so that a sweep can stop at the first that does not fit.

    Batch sizes vary on one device of each type; device counts, shares, neighbours and exact mode only at the training's
    own batch size. So the number of settings is a sum, not a product.
    """
    points: list[SweepPoint] = []
    by_type = groupby(sorted(devices, key=lambda d: (d.kind, d.id)), key=lambda d: d.kind)
    for same_type in [tuple(group) for _, group in by_type]:
        one = same_type[:1]
        points += [SweepPoint(one, batch) for batch in sorted({own, *batches})]
        points += [SweepPoint(same_type[:count], own) for count in device_counts(len(same_type), own)]
        points += [SweepPoint(one, own, share) for share in shares if share < 1.0]
        if paired:
            points += [SweepPoint(one, own, share, is_paired=True) for share in shares]
        if exact:
            points.append(SweepPoint(one, own, exact=True))
    return points


def device_counts(most: int, batch: int) -> list[int]:
    """2, 4, 8 … and ``most``, as long as every device gets two samples."""
    powers = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    return [count for count in (*powers, most) if count > 1 and 2 * count <= batch]
