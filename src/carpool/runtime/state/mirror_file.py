"""Mirror file: a copy of a job's mirror on disk, for the scheduler's machine to fetch; needs no torch.

A mirror holds a checkpoint without its checksum. The copy adds the checksum and is a checkpoint like any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAGIC = b"CPMIRROR"
HEAD = struct.Struct("<8sQQ")  # magic, steps done, length of the content
START = 64  # offset of the content
_DIGEST_BYTES = 32  # at the end of a checkpoint
_CHUNK_BYTES = 1 << 22
# pause before the next copy, in multiples of the time the last one took: at most a tenth of the disk's time
_REST_SHARE = 9.0
_NAME = re.compile(r"mirror-(\d+)\.ckpt")


class _Source(NamedTuple):
    """The source and target of a thread; it owns the descriptors."""

    mirror: int
    folder: int


class MirrorFiles:
    """Copies the mirrors of one job to its checkpoint folder, in a thread, one at a time; it keeps the newest."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self._clock = clock
        self._may_write = may_write  # whether the lease of this machine allows it
        self._copying: threading.Thread | None = None
        self._next_at = 0.0

    def copy(self, mirror: int, folder: int) -> None:
        """Copy a mirror, unless the last copy is still running, or took long and has just ended.

        The caller keeps both descriptors. The folder is held open, so that nothing is written to one that replaces it.
        """
        if self._clock() < self._next_at or (self._copying is not None and self._copying.is_alive()):
            return
        source = _Source(os.dup(mirror), os.dup(folder))
        self._copying = threading.Thread(target=self._run, args=(source,), daemon=True)
        self._copying.start()

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.join()

    def _run(self, source: _Source) -> None:
        began = self._clock()
        try:
            with contextlib.suppress(OSError):  # the disk is full, or the folder is gone: the next one may succeed
                copy_mirror(source.mirror, source.folder, self._may_write)
        finally:
            os.close(source.mirror)
            os.close(source.folder)
        ended = self._clock()
        self._next_at = ended + (ended - began) * _REST_SHARE


def copy_mirror(mirror: int, folder: int, may_write: Callable[[], bool] = lambda: True) -> str:
    """Write a mirror as a checkpoint. Returns its name; empty if it may not, or the mirror is no longer complete."""
    head = os.pread(mirror, HEAD.size, 0)
    if len(head) < HEAD.size or not may_write():
        return ""
    magic, step, length = HEAD.unpack(head)
    if magic != MAGIC or length < _DIGEST_BYTES or length > os.fstat(mirror).st_size - START:
        return ""
    name, draft = f"mirror-{step:09d}.ckpt", f".mirror.ckpt.{os.getpid()}.part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
            total = hashlib.sha256()
            for chunk in _chunks(mirror, START, length - _DIGEST_BYTES):
                total.update(chunk)
                file.write(chunk)
            file.write(total.digest())
        if os.pread(mirror, HEAD.size, 0) != head or not may_write():
            return ""
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
    _delete_older(folder, name)
    return name


def _chunks(fd: int, start: int, length: int) -> Iterator[bytes]:
    while length > 0:
        chunk = os.pread(fd, min(length, _CHUNK_BYTES), start)
        if not chunk:
            return  # the job has cut it off: its header differs then, or its checksum
        yield chunk
        start, length = start + len(chunk), length - len(chunk)


def _delete_older(folder: int, newest: str) -> None:
    for name in os.listdir(folder):
        if _NAME.fullmatch(name) and name != newest:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
