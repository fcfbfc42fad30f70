"""Anonymous shared memory files, including each worker's step counter and the ends of its lease."""

from __future__ import annotations

import mmap
import os
import struct
import time

_INT64 = struct.Struct("q")
_ENDS = struct.Struct("dd")  # after the counter: until when steps may begin, and until when the state may be saved


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
    return new_memory_file(f"steps-{job}"[:200], _INT64.size + _ENDS.size)


def boot_clock() -> float:
    """Seconds of a clock that keeps running while the machine is suspended; the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_before(end: float) -> bool:
    """Whether an end of the lease, an instant of `boot_clock`, is still to come; 0: there is none."""
    return end == 0.0 or boot_clock() <= end


def limit_worker(fd: int, steps_until: float, writes_until: float) -> None:
    """Let no step begin and no state be saved after instants of `boot_clock`, even if the executor hangs by then."""
    os.pwrite(fd, _ENDS.pack(steps_until, writes_until), _INT64.size)


def read_step_counter(fd: int) -> int:
    """Steps done, even by a worker that could no longer report them."""
    steps: int
    (steps,) = _INT64.unpack(os.pread(fd, _INT64.size, 0))
    return steps


class StepCounter:
    """A worker's side of its step counter; setting it takes a tenth of a microsecond."""

    def __init__(self, fd: int) -> None:
        memory = memoryview(mmap.mmap(fd, _INT64.size + _ENDS.size))
        self._cell, self._ends = memory[: _INT64.size].cast("q"), memory[_INT64.size :].cast("d")

    def set(self, steps: int) -> None:
        self._cell[0] = steps

    @property
    def is_fenced(self) -> bool:
        """Whether no step may begin: the lease ends soon or has ended."""
        return not is_before(self._ends[0])

    def may_save(self) -> bool:
        """Whether no other machine can be running the job by now."""
        return is_before(self._ends[1])
