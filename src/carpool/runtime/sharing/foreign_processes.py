"""Foreign processes: detects and reports other users' programs on the GPUs while jobs run."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from carpool.core.constraints.resource_limits import describe_process
from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId
from carpool.jobs.devices import Gpu, IsOurs, LocalDevice, visible
from carpool.jobs.nvml import GpuProcess, Nvml

EVERY_S = 5.0  # the driver answers within a millisecond
_DEEPEST = 64  # generations of processes between one of ours and us

ListProcesses = Callable[[int], "list[GpuProcess] | None"]  # by the number CUDA gives a GPU


class ForeignProcessMonitor:
    """Looks at our GPUs every few seconds.

    Who is there at the first look was there before us: its GPU was named all the same, and is used. A GPU that somebody
    else comes to later is left to them while nobody of ours is on it. Such a process counts once it was seen twice in
    a row, since one of ours that has just ended may still be listed; and only where we see that it exists, or the
    driver has shown that it numbers processes as we do: in a container it may not.
    """

    def __init__(
        self,
        gpus: Mapping[int, LocalDevice],
        clock: Callable[[], float],
        ask: ListProcesses | None = None,  # else the driver is asked
        is_ours: Callable[[int], bool] | None = None,
    ) -> None:
        self._gpus = gpus
        self._clock = clock
        self._ask = ask
        self._is_ours = is_ours or _is_ours
        self._next_at = clock() + EVERY_S
        self._found: dict[int, frozenset[int]] = {}
        self._first: dict[int, frozenset[int]] = {}  # who was there before us
        self._told: dict[int, OutsidersSeen] = {}
        self._numbers_alike = False
        self.facts: list[OutsidersSeen] = []  # news for the scheduler, until somebody takes them

    def has_outsiders(self, device: int) -> bool:
        """Whether somebody else computes on a device."""
        return bool(self._found.get(device))

    def tick(self, here: Collection[int]) -> list[tuple[int, str]]:
        """Look, if it is time; what has changed, in words, by device. ``here`` are those our own workers are on."""
        now = self._clock()
        if not self._gpus or now < self._next_at:
            return []
        self._next_at = now + EVERY_S
        if self._ask is None:
            self._ask = process_lister()
        return [(number, words) for number in self._gpus if (words := self._look(number, is_used=number in here))]

    def _look(self, number: int, *, is_used: bool) -> str:
        place, before = self._gpus[number], self._found.get(number, frozenset())
        assert self._ask is not None
        assert place.cuda is not None
        rows = self._ask(place.cuda)
        if rows is None:
            return ""
        others = [row for row in rows if not self._is_ours(row.pid)]
        self._numbers_alike = self._numbers_alike or len(others) < len(rows)
        if is_used and len(others) == len(rows):
            return ""  # we compute there and are not listed: the driver numbers processes differently
        now = self._found[number] = frozenset(row.pid for row in others)
        first = self._first.setdefault(number, now)
        stays = [row for row in others if row.pid in before and (self._numbers_alike or _exists(row.pid))]
        self._note(OutsidersSeen(DeviceId(number), tuple(map(_outsider, stays)), bool({*map(_pid, stays)} - first)))
        if new := [row for row in others if row.pid not in before]:
            who = ", ".join(describe_process(_outsider(row)) for row in new)
            return f"somebody else computes on {place.name}: {who}. Times measured meanwhile are not ours alone."
        return f"nobody else computes on {place.name} any more" if before and not now else ""

    def _note(self, seen: OutsidersSeen) -> None:
        """Tell who is there if it is not who was told; how much memory they hold is told with them, not by itself."""
        before = self._told.get(seen.device, OutsidersSeen(seen.device))
        if [*map(_pid, seen.processes)] != [*map(_pid, before.processes)]:
            self._told[seen.device] = seen
            self.facts.append(seen)


def process_lister() -> ListProcesses:
    """Asks the driver; where there is none, nothing is ever told."""
    nvml = Nvml.open()
    if nvml is None:
        return lambda index: None
    driver = nvml
    listed = [Gpu(place, "", uuid=driver.uuid(place)) for place in range(driver.count())]
    places = [gpu.uuid for gpu in listed]
    seen = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def ask(index: int) -> list[GpuProcess] | None:
        return driver.processes(places.index(seen[index].uuid)) if index < len(seen) else None

    return ask


def belongs_to(executor: int) -> IsOurs:
    """Tells processes of an executor from others."""
    return lambda pid: is_descendant(pid, executor) or _serves(pid, executor)


def _is_ours(pid: int) -> bool:
    return belongs_to(os.getpid())(pid)


def _serves(pid: int, executor: int) -> bool:
    """Whether a process is a server of the MPS daemon that an executor started: it may have left its parents."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    folders = [
        each.partition(b"=")[2].decode(errors="replace") for each in variables if each.startswith(b"CUDA_MPS_PIPE")
    ]
    return any(Path(folder).parent.name.partition(".")[0] == str(executor) for folder in folders)


def is_descendant(pid: int, of: int | None = None) -> bool:
    """Whether a process was started by another (without one: by this), or by one that was."""
    ancestor = os.getpid() if of is None else of
    for _ in range(_DEEPEST):
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
        try:
            # The name, in parentheses, may hold anything; the parent is the second word behind it.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


def _pid(process: GpuProcess | ForeignProcess) -> int:
    return process.pid


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _outsider(row: GpuProcess) -> ForeignProcess:
    """Whose process it is and what it is called, as far as can be seen from here."""
    folder = Path(f"/proc/{row.pid}")
    try:
        program = (folder / "comm").read_text(errors="replace").strip()
        owner = folder.stat().st_uid
    except OSError:
        return ForeignProcess(row.pid, memory_bytes=row.memory_bytes)
    try:
        user = pwd.getpwuid(owner).pw_name
    except KeyError:
        user = str(owner)
    return ForeignProcess(row.pid, user, program, row.memory_bytes)
