"""A trainer's state in a memory file, from which another process goes on: whole, or known not to be.

    "CPMIRROR", steps done, length of the content: 24 bytes, written last
    content: container.py, without its checksum (memory does not rot, and hashing takes longer than copying)

The header is wiped before the content is written, so that a writer killed in between leaves a file that says so. The
state before it lies in another file, which is kept until this one is whole (`safe.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

from carpool.runtime.container import Parts, unpack
from carpool.runtime.errors import CheckpointError

_MAGIC = b"CPMIRROR"
_HEAD = struct.Struct("<8sQQ")
_START = 64  # where the content begins


def write_mirror(fd: int, step: int, state: Any) -> int:
    """Write a state over whatever was there; the bytes it takes."""
    return write_parts(fd, step, Parts.of(state))


def write_parts(fd: int, step: int, state: Parts) -> int:
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
