"""Settings of the C allocator: huge pages, retention and release of freed memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from carpool.runtime.compat.libc import malloc_trim, mallopt, prctl

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_PR_SET_THP_DISABLE = 41  # sys/prctl.h
_SMALL_BLOCK = 64 << 10
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new process (glibc 2.35 or newer) asks for huge pages for its heap.

    A training step walks through all of its memory; pages of 2 MiB instead of 4 KiB save TLB misses.
    """
    others = [tunable for tunable in environment.get(_TUNABLES, "").split(":") if tunable]
    return {**environment, _TUNABLES: ":".join([*others, _HUGE_PAGES])}


def hide_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Undo `with_huge_pages` in place, so that processes which a job starts do not inherit it."""
    others = [tunable for tunable in environment.pop(_TUNABLES, "").split(":") if tunable]
    if others[-1:] == [_HUGE_PAGES]:
        others.pop()
    if others:
        environment[_TUNABLES] = ":".join(others)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next step instead of unmapping it.

    Measured on a small CNN: 600 page faults a step without, none with, and the step takes 15 % less time.
    """
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the maximum
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def release_freed_memory() -> None:
    """Return freed heap memory to the system."""
    malloc_trim()


def map_large_blocks() -> None:
    """Map every block above 64 KiB separately, so that resident memory equals memory in use.

    For measuring memory, not time: without it, heap fragmentation and partly used huge pages change the measurement
    of the same training by up to a tenth.
    """
    prctl(_PR_SET_THP_DISABLE, 1)
    mallopt(_M_MMAP_THRESHOLD, _SMALL_BLOCK)
