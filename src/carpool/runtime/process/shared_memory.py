"""Anonymous shared memory files, including each worker's step counter and lease end."""

from __future__ import annotations

import mmap
import os
import struct
import time

_INT64 = struct.Struct("q")
_FLOAT64 = struct.Struct("d")  # after the counter: until when steps may begin


def new_memory_file(name: str, num_bytes: int = 0) -> int:
    """The descriptor of a new memory file of zeros; pages take memory once they are touched."""
    fd = os.memfd_create(f"carpool-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def memory_file_of(data: bytes, name: str) -> int:
    """The descriptor of a new memory file with these bytes."""
    fd, done = new_memory_file(name[:200], len(data)), 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], done)
    return fd


def read_memory_file(fd: int, most: int = 1 << 48) -> bytes:
    """The bytes of a memory file; of one that is larger than allowed, one byte more than that."""
    pieces, done, size = [], 0, min(os.fstat(fd).st_size, most + 1)
    while done < size and (piece := os.pread(fd, size - done, done)):
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)


def new_step_counter(job: str) -> int:
    """The descriptor of a step counter at 0, for a worker to write, without a limit of time."""
    return new_memory_file(f"steps-{job}"[:200], _INT64.size + _FLOAT64.size)


def boot_clock() -> float:
    """Seconds of a clock that keeps running while the machine is suspended; the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def limit_steps(fd: int, until: float) -> None:
    """Let no step begin after an instant of `boot_clock`, even if the executor hangs by then; 0: no limit."""
    os.pwrite(fd, _FLOAT64.pack(until), _INT64.size)


def read_step_counter(fd: int) -> int:
    """Steps done, even by a worker that could no longer report them."""
    steps: int
    (steps,) = _INT64.unpack(os.pread(fd, _INT64.size, 0))
    return steps


class StepCounter:
    """A worker's side of its step counter; setting it takes a tenth of a microsecond."""

    def __init__(self, fd: int) -> None:
        memory = memoryview(mmap.mmap(fd, _INT64.size + _FLOAT64.size))
        self._cell, self._until = memory[: _INT64.size].cast("q"), memory[_INT64.size :].cast("d")

    def set(self, steps: int) -> None:
        self._cell[0] = steps

    @property
    def is_fenced(self) -> bool:
        """Whether the lease has ended: the job may run elsewhere, and no step may begin."""
        until: float = self._until[0]
        return until != 0.0 and boot_clock() > until
