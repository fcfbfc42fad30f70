"""Process lifetime: exit with the parent, detect child exits (prctl and pidfd)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def exit_with_parent(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the parent's thread that made this process ends; at once, if it has ended already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show (15 bytes at most)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a thread."""
    if process.poll() is None:
        await ProcessHandle(process.pid, process).end()
    process.wait()


class ProcessHandle:
    """Another process by its number, whoever's child it is: its end is seen, and can be brought about.

    It must be known to be alive when this is made: numbers are given out again.
    """

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._handle = os.pidfd_open(pid)

    async def end(self, patience_s: float | None = None) -> None:
        """Wait for its end, without a thread; when patience ends, end it. Nothing can be asked of it afterwards."""
        if self._handle < 0:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handle = os.dup(self._handle)  # several may wait, and a loop knows one reader of a descriptor
        loop.add_reader(handle, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        if self._child is not None:
            self._child.wait()
        self.let_go()

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        if self._handle >= 0:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def let_go(self) -> None:
        """Look at it no longer."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def disown(self) -> None:
        """Let it outlive this process."""
        self.let_go()
        if self._child is not None:
            self._child.returncode = 0  # else Popen complains that nobody has waited for it

    @property
    def verdict(self) -> str:
        """How it ended, as far as can be told."""
        code = None if self._child is None else self._child.poll()
        if code is None:
            return "ended"
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
