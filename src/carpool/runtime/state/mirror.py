"""State mirror: a training's state in shared memory, written while the training continues.

    "CPMIRROR", steps done, length of the content: 24 bytes, written last
    content: container.py, without its checksum (memory does not rot, and hashing takes longer than copying)

The header is wiped before the content is written, so that a writer killed in between leaves a file that says so. The
state before it lies in another file, which is kept until this one is whole (`safe.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import foreach_copy_
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.channel import Closed
from carpool.runtime.process.protocol import Message, Published, WorkerFailed
from carpool.runtime.state.tensor_file import StateParts, unpack
from carpool.runtime.worker.error_classifier import broke_message

_MAGIC = b"CPMIRROR"
_HEAD = struct.Struct("<8sQQ")
_START = 64  # where the content begins


def write_mirror(fd: int, step: int, state: Any) -> int:
    """Write a state over whatever was there; the bytes it takes."""
    return write_parts(fd, step, StateParts.of(state))


def write_parts(fd: int, step: int, state: StateParts) -> int:
    """Write a state that was taken apart before."""
    os.pwrite(fd, bytes(_HEAD.size), 0)
    end = _START
    for chunk in state.unchecked():
        end += _write(fd, memoryview(chunk), end)
    os.pwrite(fd, _HEAD.pack(_MAGIC, step, end - _START), 0)
    return end


def read_mirror(fd: int) -> tuple[int, Any]:
    """Steps done, and the state."""
    size = os.fstat(fd).st_size
    if size < _START:
        raise CheckpointError("the mirror is empty")
    view = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
    magic, step, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise CheckpointError("the mirror was not written to its end")
    return step, unpack(view[_START : _START + length], "the mirror", checked=False)


def _write(fd: int, chunk: memoryview, at: int) -> int:
    """Write all of a chunk: one call writes 2 GiB at most."""
    done = 0
    while done < len(chunk):
        done += os.pwrite(fd, chunk[done:], at + done)
    return done


# At a step boundary the state is copied off the device, into pinned memory that is kept for the next time; then the next
# step begins, and a thread writes the copy into the memory file. A ResNet18's 89 MB are copied in 2 ms; making the bytes
# ready and writing them takes 80. Where tensors are on the host already, copying them would take as long as writing them,
# and where they may leave the device between two turns, they lie on the host half of the time: there the worker writes
# the file itself.


class HostStaging:
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
            foreach_copy_(self._twins, [tensor.contiguous() for tensor in tensors], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return self._twins

    def wait(self) -> None:
        """Return when all is there."""
        if self._arrived is not None:
            self._arrived.synchronize()


class MirrorWriter:
    """Writes the state of a worker's training into memory files, and says so when one is whole."""

    def __init__(
        self, trainer: Trainer, lodger: SwapClient, say: Callable[[Message], None], *, aside: bool | None = None
    ) -> None:
        self._trainer = trainer
        self._lodger = lodger
        self._say = say
        self._aside = trainer.device.type == "cuda" and lodger.stays if aside is None else aside
        self._staging = HostStaging(trainer.device)
        self._writer: threading.Thread | None = None

    def publish(self, fd: int) -> None:
        """Have the state as it is now written; the descriptor stays the caller's."""
        self.finish()
        step = self._trainer.cursor.step
        with self._lodger.readable():
            state = StateParts.of(self._trainer.state_dict())
            if not self._aside:
                self._write(fd, step, state)
                return
            taken = StateParts(state.header, self._staging.take(state.tensors))
        self._writer = threading.Thread(target=self._write_aside, args=(os.dup(fd), step, taken), daemon=True)
        self._writer.start()

    def finish(self) -> None:
        """Return when nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write_aside(self, fd: int, step: int, state: StateParts) -> None:
        try:
            with suppress(Closed):
                self._write(fd, step, state)
        finally:
            os.close(fd)

    def _write(self, fd: int, step: int, state: StateParts) -> None:
        try:
            self._staging.wait()
            write_parts(fd, step, state)
        except OSError as error:
            self._say(WorkerFailed("disk", f"the mirror was not written: {error.strerror}", step))
        except RuntimeError as error:  # the GPU is lost
            self._say(broke_message(error, step))
        else:
            self._say(Published(step))
