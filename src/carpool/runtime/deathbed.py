"""Dying with one's parent, and seeing one's children die: what Linux offers through prctl and pidfd."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the parent's thread that made this process ends; at once, if it has ended already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)


def call_oneself(name: str) -> None:
    """Set the name that ps and top show (15 bytes at most)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


async def end_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a thread."""
    if process.poll() is None:
        handle = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
    process.wait()
