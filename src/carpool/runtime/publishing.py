"""Mirrors that are written while the training goes on.

At a step boundary the state is copied off the device, into pinned memory that is kept for the next time; then the next
step begins, and a thread writes the copy into the memory file. A ResNet18's 89 MB are copied in 2 ms; making the bytes
ready and writing them takes 80. Where tensors are on the host already, copying them would take as long as writing them,
and where they may leave the device between two turns, they lie on the host half of the time: there the worker writes
the file itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from carpool.runtime.channel import Closed
from carpool.runtime.container import Parts
from carpool.runtime.lodger import Lodger
from carpool.runtime.mirror import write_parts
from carpool.runtime.mishap import broke
from carpool.runtime.protocol import Broke, Message, Published
from carpool.runtime.trainer import Trainer


class Staging:
    """Copies on the host of tensors as they are now; each taking overwrites the one before."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._twins: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        if self._is_cuda:
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies, which hold their contents after `wait`; what the device is told later comes later."""
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self._twins]:
            self._twins = []  # first let go of those that were there
            self._twins = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        with torch.no_grad():
            torch._foreach_copy_(self._twins, [tensor.contiguous() for tensor in tensors], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return self._twins

    def wait(self) -> None:
        """Return when all is there."""
        if self._arrived is not None:
            self._arrived.synchronize()


class Publisher:
    """Writes the state of a worker's training into memory files, and says so when one is whole."""

    def __init__(
        self, trainer: Trainer, lodger: Lodger, say: Callable[[Message], None], *, aside: bool | None = None
    ) -> None:
        self._trainer = trainer
        self._lodger = lodger
        self._say = say
        self._aside = trainer.device.type == "cuda" and lodger.stays if aside is None else aside
        self._staging = Staging(trainer.device)
        self._writer: threading.Thread | None = None

    def publish(self, fd: int) -> None:
        """Have the state as it is now written; the descriptor stays the caller's."""
        self.finish()
        step = self._trainer.cursor.step
        with self._lodger.readable():
            state = Parts.of(self._trainer.state_dict())
            if not self._aside:
                self._write(fd, step, state)
                return
            taken = Parts(state.header, self._staging.take(state.tensors))
        self._writer = threading.Thread(target=self._write_aside, args=(os.dup(fd), step, taken), daemon=True)
        self._writer.start()

    def finish(self) -> None:
        """Return when nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write_aside(self, fd: int, step: int, state: Parts) -> None:
        try:
            with suppress(Closed):
                self._write(fd, step, state)
        finally:
            os.close(fd)

    def _write(self, fd: int, step: int, state: Parts) -> None:
        try:
            self._staging.wait()
            write_parts(fd, step, state)
        except OSError as error:
            self._say(Broke("disk", f"the mirror was not written: {error.strerror}", step))
        except RuntimeError as error:  # the GPU is lost
            self._say(broke(error, step))
        else:
            self._say(Published(step))
