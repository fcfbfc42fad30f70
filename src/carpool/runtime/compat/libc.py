"""C library calls that Python does not wrap: prctl, fallocate, and the settings of glibc's malloc."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

from carpool.runtime.compat import Feature

_HUGE_PAGES_SINCE = (2, 35)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int | bytes) -> int:
    """Call prctl(2) for this process or thread; its errno, 0 on success."""
    function = getattr(_libc, "prctl", None)
    if function is None:
        return errno.ENOSYS
    return 0 if function(option, argument, 0, 0, 0) == 0 else ctypes.get_errno()


def punch_hole(handle: int, first: int, stop: int) -> None:
    """Free the blocks of a part of a file, which then reads as zeros; OSError if the file system cannot."""
    function = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(handle, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(first), ctypes.c_int64(stop - first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mallopt(parameter: int, value: int) -> None:
    """Set a parameter of glibc's malloc; other C libraries ignore it."""
    if (function := getattr(_libc, "mallopt", None)) is not None:
        function(parameter, value)


def malloc_trim() -> None:
    """Return free heap memory to the system; other C libraries keep it."""
    if (function := getattr(_libc, "malloc_trim", None)) is not None:
        function(0)


def features() -> Iterator[Feature]:
    """The functions of the C library and the kernel in use, and whether they are available."""
    yield Feature("prctl", _missing("prctl"), "Required: without it workers outlive a killed executor.")
    yield Feature("pidfd", _pidfd_problem(), "Required, to detect exits of processes: use Linux 5.3 or newer.")
    yield Feature("fallocate", _missing("fallocate"), "A long log is emptied, instead of freed from its beginning.")
    yield Feature(
        "malloc",
        _missing("mallopt", "malloc_trim"),
        "Steps on a CPU map fresh pages each time: those of a small CNN take 15 % longer.",
    )
    yield Feature(
        "huge pages", _huge_page_problem(), "The heap of workers has 4 KiB pages: steps on a CPU have more TLB misses."
    )


def _missing(*names: str) -> str:
    return ", ".join(f"the C library has no {name}" for name in names if not hasattr(_libc, name))


def _pidfd_problem() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"pidfd_open: {error}"
    return ""


def _huge_page_problem() -> str:
    try:
        library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):
        return "the C library is not glibc"
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < _HUGE_PAGES_SINCE:
        return f"glibc {version} is older than 2.35"
    return ""
