"""Process tree of a command: stop, continue, bind to cores, and measure all its processes through /proc."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED = frozenset({"T", "t", "Z", "X", ""})
_PENDING = re.compile(r"^ShdPnd:\s*([0-9a-f]+)", re.MULTILINE)  # signals of a process that wait to be delivered
_MAX_PASSES = 100  # over a tree that keeps forking


class TreeUsage(NamedTuple):
    """The resources that the live processes of a tree have used."""

    cpu_s: float = 0.0
    resident_bytes: int = 0


def descendants(pid: int) -> list[int]:
    """All processes below this one, parents before children."""
    found: list[int] = []
    pending = [pid]
    while pending:
        children = _children(pending.pop(0))
        found += children
        pending += children
    return found


def stop_tree(pid: int) -> bool:
    """Send SIGSTOP to all processes below this one. Returns whether all have stopped.

    Repeat until they have: a process may fork before the signal reaches it. Parents come before their children, so
    that none sees a stopped child.
    """
    running = [each for each in descendants(pid) if not _is_stopped(each)]
    _signal(running, signal.SIGSTOP)
    return not running


def _is_stopped(pid: int) -> bool:
    """Whether a process executes no more instructions of its program until it is continued.

    A parent between vfork and the exec of its child sleeps uninterruptibly: if the child was stopped first, the parent
    is not stopped before the child continues. It has SIGSTOP pending instead, which precedes its next instruction.
    """
    state = _state(pid)
    if state != "D":
        return state in _STOPPED
    pending = _PENDING.search(_read(_PROC / str(pid) / "status"))
    return pending is not None and bool(int(pending[1], 16) >> (signal.SIGSTOP - 1) & 1)


def continue_tree(pid: int) -> None:
    """Continue all processes below this one, children first."""
    _signal(reversed(descendants(pid)), signal.SIGCONT)


def kill_tree(pid: int) -> None:
    """Kill all processes below this one; repeat until none is left."""
    _signal(descendants(pid), signal.SIGKILL)


def bind_tree(pid: int, cores: Collection[int]) -> None:
    """Bind every thread of a process and of all below it to these cores; repeated for threads started meanwhile."""
    bound: set[int] = set()
    for _ in range(_MAX_PASSES):
        new = {thread for each in (pid, *descendants(pid)) for thread in _threads(each)} - bound
        if not new:
            return
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
        bound |= new


def usage(pid: int) -> TreeUsage:
    """CPU time and resident memory of all processes below this one, including exited ones that they waited for."""
    page = os.sysconf("SC_PAGE_SIZE")
    ticks = pages = 0
    for each in descendants(pid):
        words = _read(_PROC / str(each) / "stat").rpartition(")")[2].split()
        if len(words) > 21:  # proc(5): from the third field on; utime, stime, cutime, cstime; rss
            ticks += sum(map(int, words[11:15]))
            pages += int(words[21])
    return TreeUsage(ticks / _TICKS_PER_S, pages * page)


def available_memory(meminfo: Path = _PROC / "meminfo", cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes of RAM that new work could take without swapping, and all of it; a container's limit applies."""
    rows = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    total, available = (int(rows.get(key, "0").split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        total, available = min(total, int(limit)), min(available, int(limit) - int(used))
    return max(0, available), total


def _children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    return [int(child) for thread in _threads(pid) for child in _read(_task(pid, thread) / "children").split()]


def _threads(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in (_PROC / str(pid) / "task").iterdir()]
    except OSError:  # it has exited
        return []


def _state(pid: int) -> str:
    """The letter of proc(5); empty if it has exited."""
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].strip()[:1]


def _task(pid: int, thread: int) -> Path:
    return _PROC / str(pid) / "task" / str(thread)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _signal(pids: Iterable[int], sign: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sign)
