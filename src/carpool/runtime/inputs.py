"""Where a training's data lies and who fetches its batches, chosen once before the first step; pure.

The ways, best first: rows that lie on the device are gathered there; rows that do not fit are gathered on the host into
pinned memory and copied while the device computes the step before; datasets that are read sample by sample are read
ahead by processes of their own. All of them give the batches of the plain way, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FITS = 0.25  # of the device's free memory that data may take: models, activations and other jobs need the rest
GPU_READERS = 2  # processes that read for a GPU unless the training says how many


class Way(StrEnum):
    """How batches come about."""

    PLAIN = "plain"  # made by the process that computes, when they are needed
    ON_DEVICE = "on the device"
    AHEAD = "ahead"  # gathered and copied while the step before is computed
    READERS = "readers"


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, and why."""

    way: Way
    words: str
    readers: int = 0


def choose(
    *, on_gpu: bool, row_bytes: int | None, free_bytes: int, is_map_style: bool, readers: int | None = None
) -> Choice:
    """The way for a dataset. ``row_bytes`` is the size of data that lies in tensors, ``None`` for other data."""
    if is_map_style:
        count = readers if readers is not None else GPU_READERS if on_gpu else 0
        if count:
            return Choice(Way.READERS, f"samples are read ahead by {count} processes of their own", count)
        return Choice(Way.PLAIN, "samples are read by the process that computes: workers = 0")
    if not on_gpu:
        return Choice(Way.PLAIN, "the data lies in the memory that computes")
    if row_bytes is None:
        return Choice(Way.PLAIN, "batches are made by the dataset itself and copied to the device")
    sizes = (
        f"the data takes {row_bytes / 2**20:.1f} MiB, a quarter of the free memory is {free_bytes * FITS / 2**20:.0f}"
    )
    if row_bytes <= free_bytes * FITS:
        return Choice(Way.ON_DEVICE, f"the data lies on the device: {sizes}")
    return Choice(Way.AHEAD, f"batches are copied to the device ahead of their step: {sizes}")
