"""Device handoff: passes a device from one process to the next through a shared memory word and an eventfd.

The word holds the number of the last turn grant that has ended. A worker writes the number of its grant when it is done
and signals the eventfd; the next one waits for the number of the grant before its own. The executor writes it too, when
a worker gives up its turn or dies, so that no process waits for a number that never comes.

On a GPU no host is involved: the stream of the next process waits for the number with its whole step queued behind, and
the stream of the previous one writes it after its last kernel. The gap is the GPU's own, not that of waking a process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Protocol

from carpool.runtime.process.shared_memory import new_memory_file

if TYPE_CHECKING:
    import torch  # the executor uses this module without it

_PAGE = mmap.PAGESIZE


def new_handoff() -> tuple[int, int]:
    """Descriptors of a new handoff at number 0: its memory and its eventfd."""
    return new_memory_file("handoff", _PAGE), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class DeviceHandoff:
    """One process's view of a device's handoff; owns both descriptors."""

    def __init__(self, memory: int, event: int) -> None:
        self.descriptors = memory, event
        self.event = event
        self.page = mmap.mmap(memory, _PAGE)
        self._cells = memoryview(self.page).cast("I")

    def reach(self, number: int) -> None:
        """Mark all grants up to this number as ended; signals even if a device has written it already."""
        if number > self._cells[0]:
            self._cells[0] = number
        with contextlib.suppress(BlockingIOError):  # signalled already
            os.eventfd_write(self.event, 1)

    def has_reached(self, number: int) -> bool:
        return self._cells[0] >= number

    def clear_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


class HandoffSignal(Protocol):
    """A device that waits for the handoff and passes it on in stream order."""

    def hold_until(self, number: int) -> None:
        """Make all work queued from now on wait for this number."""

    def reach(self, number: int) -> None:
        """Write this number when all work queued so far is done."""


def signal_of(handoff: DeviceHandoff, device: torch.device) -> HandoffSignal | None:
    """The signal of a GPU; None if the hosts have to wait and pass the device on themselves."""
    if device.type != "cuda":
        return None
    from carpool.runtime.compat.cuda_driver import CudaDriverError
    from carpool.runtime.compat.stream_signal import StreamSignal

    try:
        return StreamSignal(handoff.page, device)
    except CudaDriverError:  # the driver lacks stream memory operations
        return None
