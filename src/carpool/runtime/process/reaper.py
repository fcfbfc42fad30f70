"""Reaper: runs one command and kills all its processes when it ends or the executor dies.

``python -m carpool.runtime.process.reaper FD PARENT GRACE_S CORES -- COMMAND …``: when FD is closed, at the latest by
the executor's death, everything is killed. SIGTERM is forwarded to the command, with a kill after the grace period.
SIGUSR1 stops all processes of the command, SIGUSR2 continues them. As sub-reaper it adopts and kills processes that the
command leaves behind. It exits with the command's exit code, or by the same signal. The socket in CARPOOL_CHANNEL is
passed to the command, for `carpool.session`.
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
from pathlib import Path

from carpool.runtime.compat.process_lifetime import adopt_orphans, exit_with_parent, set_process_name

NOT_STARTED = 127
FREEZE, UNFREEZE = signal.SIGUSR1, signal.SIGUSR2  # to the reaper: stop all processes of the command, or continue them


def main() -> int:
    """Run the command in the arguments."""
    fd, parent, grace_s, cores = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    command = sys.argv[6:]
    adopt_orphans()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGCHLD, FREEZE, UNFREEZE):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(parent, signal.SIGTERM)
    set_process_name("carpool-reaper")
    os.set_inheritable(fd, False)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    pid = os.getpid()
    channel = int(os.environ["CARPOOL_CHANNEL"]) if "CARPOOL_CHANNEL" in os.environ else None
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[channel] if channel is not None else [],
            preexec_fn=lambda: exit_with_parent(pid),  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        print(f"carpool: {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - this is the job's log
        return NOT_STARTED
    if channel is not None:
        os.close(channel)
    status = _watch(child, fd, wake, grace_s)
    _kill_all()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in {signal.SIGKILL, signal.SIGSTOP} else None
        os.kill(pid, -status)
    return status


def _watch(child: subprocess.Popen[bytes], fd: int, wake: int, grace_s: float) -> int:
    """Wait until the command has ended or was killed."""
    deadline: float | None = None
    while child.poll() is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([fd, wake], [], [], left)
        if fd in ready or left == 0.0:
            _kill_all()
            return child.wait()
        received = os.read(wake, 64) if wake in ready else b""
        for each in received:
            if each in (FREEZE, UNFREEZE, signal.SIGTERM):  # a stopped process could not handle SIGTERM
                _signal_all(signal.SIGSTOP if each == FREEZE else signal.SIGCONT)
        if signal.SIGTERM in received and deadline is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
    return child.returncode


def _kill_all() -> None:
    """Kill every descendant; orphans are reparented to us, so that the loop ends when none is left."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _signal_all(number: signal.Signals, parent: int | None = None) -> None:
    """Send a signal to every descendant, parents first: a stopped one starts no further processes."""
    for pid in _children(parent):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        _signal_all(number, pid)


def _children(parent: int | None = None) -> list[int]:
    """The children of all threads of a process, by default this one."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


if __name__ == "__main__":
    sys.exit(main())
