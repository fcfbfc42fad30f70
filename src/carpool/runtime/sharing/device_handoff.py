"""Device handoff: passes a device from one process to the next through a shared memory word and an eventfd.

The number says which grants (turns.py) have come to their ends. Whoever is through writes the number of its own grant
and rings; whoever comes next waits for the number of the grant before its own. The executor writes it too, when a
worker gives back, rests or dies, so that nobody waits for a number that never comes.

On a GPU neither of the two needs its host for it: the stream of the next one waits for the number, its whole step
queued behind, and the stream of the one before writes it as soon as its last kernel is through. So the gap between them
is what the GPU itself takes, not what two operating-system processes take to wake up.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Protocol

import torch

from carpool.runtime.compat.cuda_driver import CudaDriverError
from carpool.runtime.compat.stream_signal import StreamSignal
from carpool.runtime.process.shared_memory import new_memory_file

_PAGE = mmap.PAGESIZE


def new_handoff() -> tuple[int, int]:
    """The descriptors of a baton that stands at 0: its memory and its bell."""
    return new_memory_file("baton", _PAGE), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class DeviceHandoff:
    """One process's hold on the baton of a device; keeps both descriptors."""

    def __init__(self, memory: int, bell: int) -> None:
        self.descriptors = memory, bell
        self.bell = bell
        self.page = mmap.mmap(memory, _PAGE)
        self._cells = memoryview(self.page).cast("I")

    def reach(self, number: int) -> None:
        """All grants up to this number are over; rings even if a device has written that already."""
        if number > self._cells[0]:
            self._cells[0] = number
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.eventfd_write(self.bell, 1)

    def has_reached(self, number: int) -> bool:
        """Whether the grant of this number is over."""
        return self._cells[0] >= number

    def hush(self) -> None:
        """Let the bell be quiet until it is rung again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def close(self) -> None:
        """Let go of it."""
        for fd in self.descriptors:
            os.close(fd)


class HandoffSignal(Protocol):
    """A device that waits for the baton, and passes it on, in the order of its own work."""

    def hold_until(self, number: int) -> None:
        """Let nothing that is said to the device from now on be done before this number is reached."""
        ...

    def reach(self, number: int) -> None:
        """Reach this number when all that was said to the device so far has been done."""
        ...


def signal_of(baton: DeviceHandoff, device: torch.device) -> HandoffSignal | None:
    """The signal of a GPU; None where there is none, and hosts have to wait and pass it on themselves."""
    if device.type != "cuda":
        return None
    try:
        return StreamSignal(baton.page, device)
    except CudaDriverError:
        return None
