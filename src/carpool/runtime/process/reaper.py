"""Reaper: runs one command and kills all its processes when it ends or the executor dies.

``python -m carpool.runtime.process.reaper FD PARENT GRACE_S CORES -- COMMAND …``: when FD closes (the executor's exit
closes it too), all processes are killed. SIGTERM is forwarded to the command's process group; after the grace period
all its descendants are killed. As sub-reaper it adopts and kills processes that the command leaves behind. It exits
with the command's exit code, or by the same signal. The socket in CARPOOL_CHANNEL is passed to the command, for
`carpool.session`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from carpool.runtime.compat.process_lifetime import adopt_orphans, exit_with_parent, set_process_name

NOT_STARTED = 127


class Child(Protocol):
    """The command's first process, as `subprocess.Popen` describes it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class ForkedChild:
    """A child of this process that was forked without `subprocess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # `_kill_all` has reaped it
                pid, status = self.pid, signal.SIGKILL
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def supervise(start: Callable[[], Child], fd: int, grace_s: float) -> int:
    """Start a command as a child and wait until it and all its descendants have ended. Returns its exit code."""
    adopt_orphans()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    set_process_name("carpool-reaper")
    os.set_inheritable(fd, False)
    status = _watch(start(), fd, wake, grace_s)
    _kill_all()
    return status


def main() -> int:
    """Run the command in the arguments."""
    fd, parent, grace_s, cores = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    command = sys.argv[6:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(parent, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        status = supervise(lambda: _spawn(command), fd, grace_s)
    except OSError as error:
        print(f"carpool: {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - this is the job's log
        return NOT_STARTED
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in {signal.SIGKILL, signal.SIGSTOP} else None
        os.kill(os.getpid(), -status)
    return status


def _spawn(command: list[str]) -> Child:
    pid = os.getpid()
    channel = int(os.environ["CARPOOL_CHANNEL"]) if "CARPOOL_CHANNEL" in os.environ else None

    def prepare() -> None:
        exit_with_parent(pid)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the reaper ignores it, which exec would keep

    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[channel] if channel is not None else [],
        preexec_fn=prepare,  # noqa: PLW1509 - there is one thread
    )
    if channel is not None:
        os.close(channel)
    return child


def _watch(child: Child, fd: int, wake: int, grace_s: float) -> int:
    """Wait until the command has ended or was killed."""
    deadline: float | None = None
    events = select.poll()  # not select(), which refuses descriptors from 1024 on: an executor of many jobs has those
    for each in (fd, wake):
        events.register(each, select.POLLIN)
    while (code := child.poll()) is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = {each for each, _ in events.poll(None if left is None else 1e3 * left)}
        if fd in ready or left == 0.0:
            _kill_all()
            return child.wait()
        received = os.read(wake, 64) if wake in ready else b""
        if signal.SIGTERM in received and deadline is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
    return code


def _kill_all() -> None:
    """Kill every descendant; orphans are reparented to us, so that the loop ends when none is left."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    named = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in named.split()]


if __name__ == "__main__":
    sys.exit(main())
