"""Dying with one's parent: what Linux offers through prctl."""

from __future__ import annotations

import ctypes
import os
import signal

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
