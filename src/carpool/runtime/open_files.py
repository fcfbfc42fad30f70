"""Files that are open for reading when a process is forked: the child gets places of its own in them.

Parent and child share one place in each of them. A dataset that keeps a file open, goes to a sample and reads it, would
be moved by others between the two, and read other samples without an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

_FILES = Path("/proc/self/fd")


def places() -> dict[int, int]:
    """The place in every plain file that this process reads; to be asked for before it is forked."""
    found: dict[int, int] = {}
    for file in [int(path.name) for path in _FILES.iterdir()]:
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if _is_read(file):
                found[file] = os.lseek(file, 0, os.SEEK_CUR)
    return found


def reopen(places: Mapping[int, int]) -> None:
    """In the child: open these files anew, under the same numbers and at the same places."""
    for file, at in places.items():
        with contextlib.suppress(OSError):  # who may not open it any more shares its place, as before
            again = os.open(_FILES / str(file), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(again, at, os.SEEK_SET)
            os.dup2(again, file, inheritable=os.get_inheritable(file))
            os.close(again)


def _is_read(file: int) -> bool:
    """Whether it is a plain file that is open for reading alone."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return False
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
