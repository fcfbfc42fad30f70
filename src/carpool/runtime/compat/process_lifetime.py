"""Process lifetime: exit with the parent, detect child exits (prctl and pidfd)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from carpool.runtime.compat.libc import prctl

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # sys/prctl.h


def exit_with_parent(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Receive a signal when the parent's thread that started this process exits; at once if it has exited already."""
    if error := prctl(_PR_SET_PDEATHSIG, int(sign)):
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), sign)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent exits."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show (15 bytes at most)."""
    prctl(_PR_SET_NAME, name.encode()[:15])


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a thread."""
    if process.poll() is None:
        handle = ProcessHandle(process.pid, process)
        try:
            await handle.wait()
        finally:
            handle.close()
    process.wait()


class ProcessHandle:
    """Waits for another process, a child or not, and kills it.

    The process must be alive when the handle is made, since the kernel reuses process ids.
    """

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._fd = os.pidfd_open(pid)

    async def wait(self, kill_after_s: float | None = None) -> None:
        """Wait for the exit without a thread, and kill the process after a timeout; closes the handle."""
        if self._fd < 0:
            return
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        fd = os.dup(self._fd)  # an event loop allows one reader per descriptor
        loop.add_reader(fd, exited.set)
        try:
            await asyncio.wait_for(exited.wait(), kill_after_s)
        except TimeoutError:
            self.kill()
            await exited.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        if self._child is not None:
            self._child.wait()
        self.close()

    def kill(self) -> None:
        if self._fd >= 0:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def detach(self) -> None:
        """Let the process outlive this one."""
        self.close()
        if self._child is not None:
            self._child.returncode = 0  # else Popen warns that the child still runs

    @property
    def exit_reason(self) -> str:
        """The exit code or signal, where it is known."""
        code = None if self._child is None else self._child.poll()
        if code is None:
            return "ended"
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
