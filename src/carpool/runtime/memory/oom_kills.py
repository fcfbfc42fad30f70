"""OOM kills: whether the kernel's OOM killer ended a process of this machine, and whose limit was reached.

A process killed for memory looks like any other killed by SIGKILL; only the kernel's counters show the cause. They are
read per control group (v2: ``memory.events``, v1: ``memory.oom_control`` and ``memory.failcnt``), else for the whole
machine (``/proc/vmstat``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from carpool.core.units import format_bytes

_UNLIMITED = 1 << 60  # version 1 shows a huge number for no limit


class _Group(NamedTuple):
    """Counters of one control group."""

    path: Path
    kills: int  # processes in it that were killed for memory, whichever limit was reached
    reached: int  # how often its own limit was reached
    limit_bytes: int  # 0: none


class OomKills:
    """Counts kills for memory since it was made; each is claimed by one process that was lost."""

    def __init__(self, proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._root = control_groups
        self._groups = {group.path: group for group in self._read_groups()}
        self._machine_kills = self._read_machine()
        self._unclaimed = 0
        self._cause = ""  # of the newest kill

    def claim(self) -> str:
        """Why a process that was just killed ran out of memory, and the way out; empty: no sign of that."""
        groups = {group.path: group for group in self._read_groups()}
        machine = self._read_machine()
        both = [(self._groups[path], group) for path, group in groups.items() if path in self._groups]
        kills = max([after.kills - before.kills for before, after in both], default=machine - self._machine_kills)
        if kills > 0:
            reached = [after for before, after in both if after.limit_bytes and after.reached > before.reached]
            self._unclaimed, self._cause = self._unclaimed + kills, _cause(reached)
        self._groups, self._machine_kills = groups, machine
        if not self._unclaimed:
            return ""
        self._unclaimed -= 1
        return self._cause

    def _read_groups(self) -> Iterator[_Group]:
        """This process's control group and those around it, the innermost first."""
        for line in _text(self._proc / "self" / "cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            is_second = number == "0" and not controllers
            if not is_second and "memory" not in controllers.split(","):
                continue
            root = self._root if is_second else self._root / "memory"
            inner = root / path.strip("/")
            for folder in (inner, *inner.parents):
                if folder != root and root not in folder.parents:
                    break
                group = _second_version(folder) if is_second else _first_version(folder)
                if group is not None:
                    yield group

    def _read_machine(self) -> int:
        return _fields(self._proc / "vmstat").get("oom_kill", 0)


def _cause(reached: Sequence[_Group]) -> str:
    """The innermost limit that was reached, else that of the machine, and the way out."""
    if not reached:
        return "out of memory: the machine has no RAM left. Lower the memory use, or set ram so that fewer jobs run"
    size = format_bytes(reached[0].limit_bytes)
    limit = f"out of memory: the limit of the control group (container or service) is {size}"
    return f"{limit}. Raise it, lower the memory use, or set ram so that fewer jobs run"


def _second_version(folder: Path) -> _Group | None:
    events = _fields(folder / "memory.events")
    if "oom_kill" not in events:
        return None
    return _Group(folder, events["oom_kill"], events.get("oom", 0), _number(_text(folder / "memory.max")))


def _first_version(folder: Path) -> _Group | None:
    control = _fields(folder / "memory.oom_control")
    if "oom_kill" not in control:
        return None
    limit, reached = (_number(_text(folder / name)) for name in ("memory.limit_in_bytes", "memory.failcnt"))
    return _Group(folder, control["oom_kill"], reached, 0 if limit >= _UNLIMITED else limit)


def _fields(path: Path) -> dict[str, int]:
    """A file of lines such as ``oom_kill 3``."""
    pairs = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii")
    return ""
