"""Disk space of a store: detects a full disk, and holds a reserve for writes that are still needed then."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

RESERVE = "reserve"  # in the state folder
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_ROOM_BYTES = 1 << 20  # with less free, SQLite's general errors mean a full disk
_SQLITE_GENERAL = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}  # also raised when -wal or -shm cannot grow
_RESERVE_BYTES = 4 << 20


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether an error means that the disk of a folder has no room."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code in _SQLITE_GENERAL and _free_bytes(folder) < _NO_ROOM_BYTES)


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return _NO_ROOM_BYTES
    return found.f_bavail * found.f_frsize


class DiskReserve:
    """A file that reserves space: removed when the disk is full, so that the ends of accepted jobs can be stored."""

    def __init__(self, folder: Path, size: int = _RESERVE_BYTES) -> None:
        self._path = folder / RESERVE
        self._size = size

    def hold(self) -> bool:
        """Allocate the reserve if it is not allocated; False if there is no room for it."""
        with suppress(OSError):
            if self._path.stat().st_blocks * 512 >= self._size:
                return True
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, self._size)
            finally:
                os.close(handle)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Free the reserve; False if there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
