"""Foreign processes: detects and reports programs on the GPUs that carpool did not start."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from carpool.core.constraints.resource_limits import describe_process
from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId
from carpool.jobs.devices import Gpu, IsOurs, LocalDevice, visible
from carpool.jobs.nvml import GpuProcess, Nvml
from carpool.runtime.process.launch import EXECUTOR_PID

INTERVAL_S = 5.0  # the driver answers within a millisecond
_MAX_DEPTH = 64  # generations between one of our processes and the executor

ListProcesses = Callable[[int], "list[GpuProcess] | None"]  # by CUDA index


class ForeignProcessMonitor:
    """Checks every few seconds for foreign processes on our GPUs.

    A GPU with foreign processes at the first check is used: the user named it nevertheless. If a foreign process starts
    on a GPU later, jobs there stay, and no other job is placed there until that process has ended.

    A process counts once two checks in a row have found it, because a worker that has exited may still be listed. In a
    container the driver may use other pids than we do: until it has listed one of our pids, a process counts only if
    its pid exists here.
    """

    def __init__(
        self,
        gpus: Mapping[int, LocalDevice],
        clock: Callable[[], float],
        list_processes: ListProcesses | None = None,  # None: NVML
        is_ours: Callable[[int], bool] | None = None,
    ) -> None:
        self._gpus = gpus
        self._clock = clock
        self._list_processes = list_processes
        self._is_ours = is_ours or belongs_to(os.getpid())
        self._next_at = clock() + INTERVAL_S
        self._found: dict[int, frozenset[int]] = {}
        self._initial: dict[int, frozenset[int]] = {}
        self._reported: dict[int, OutsidersSeen] = {}
        self._shares_pids = False  # the driver uses our process numbering
        self.facts: list[OutsidersSeen] = []  # for the scheduler, until taken

    def has_foreign_processes(self, device: int) -> bool:
        return bool(self._found.get(device))

    def tick(self, in_use: Collection[int]) -> list[tuple[int, str]]:
        """Check if it is time. Returns notes about changes by device. Our workers are on the devices ``in_use``."""
        now = self._clock()
        if not self._gpus or now < self._next_at:
            return []
        self._next_at = now + INTERVAL_S
        if self._list_processes is None:
            self._list_processes = process_lister()
        used = {self._gpus[number].cuda for number in in_use if number in self._gpus}
        return [
            (number, note)
            for number, device in self._gpus.items()
            if (note := self._look(number, is_used=device.cuda in used))
        ]

    def _look(self, number: int, *, is_used: bool) -> str:
        device, before = self._gpus[number], self._found.get(number, frozenset())
        assert self._list_processes is not None
        assert device.cuda is not None
        rows = self._list_processes(device.cuda)
        if rows is None:
            return ""
        foreign = [row for row in rows if not self._is_ours(row.pid)]
        self._shares_pids = self._shares_pids or len(foreign) < len(rows)
        if is_used and len(foreign) == len(rows):
            return ""  # our own worker is not listed: the driver numbers processes differently
        now = self._found[number] = frozenset(row.pid for row in foreign)
        initial = self._initial.setdefault(number, now)
        stays = [row for row in foreign if row.pid in before and (self._shares_pids or _exists(row.pid))]
        is_new = any(row.pid not in initial for row in stays)
        self._report(OutsidersSeen(DeviceId(number), tuple(map(_described, stays)), is_new))
        if new := [row for row in foreign if row.pid not in before]:
            named = ", ".join(describe_process(_described(row)) for row in new)
            return f"another program computes on {device.name}: {named}. It affects step times measured meanwhile."
        return f"no other program computes on {device.name} any longer" if before and not now else ""

    def _report(self, seen: OutsidersSeen) -> None:
        """Report a changed set of processes; a change of their memory alone is not reported."""
        before = self._reported.get(seen.device, OutsidersSeen(seen.device))
        if [process.pid for process in seen.processes] != [process.pid for process in before.processes]:
            self._reported[seen.device] = seen
            self.facts.append(seen)


def process_lister() -> ListProcesses:
    """Lists processes by NVML; without a driver the list is always unknown."""
    nvml = Nvml.open()
    if nvml is None:
        return lambda index: None
    driver = nvml
    listed = [Gpu(place, "", uuid=driver.uuid(place)) for place in range(driver.count())]
    places = [gpu.uuid for gpu in listed]
    seen = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def list_processes(index: int) -> list[GpuProcess] | None:
        return driver.processes(places.index(seen[index].uuid)) if index < len(seen) else None

    return list_processes


def belongs_to(executor: int) -> IsOurs:
    """A function that distinguishes an executor's processes from others.

    The server of its MPS daemon and the reapers of commands leave its process tree; they keep its environment.
    """
    return lambda pid: any(each == executor or _has_environment_of(executor, each) for each in _ancestry(pid))


def _has_environment_of(executor: int, pid: int) -> bool:
    """Whether a process was started with the variables of an executor's MPS daemon or fork server."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    values = {name: value.decode(errors="replace") for name, _, value in (each.partition(b"=") for each in variables)}
    folder = Path(values.get(b"CUDA_MPS_PIPE_DIRECTORY", "")).parent
    return str(executor) in {values.get(EXECUTOR_PID.encode()), folder.name.partition(".")[0]}


def is_descendant(pid: int, of: int | None = None) -> bool:
    """Whether a process descends from another one, by default from this one."""
    return (os.getpid() if of is None else of) in _ancestry(pid)


def _ancestry(pid: int) -> Iterator[int]:
    """A process, its parent and so on, without the first process of the system."""
    for _ in range(_MAX_DEPTH):
        if pid <= 1:
            return
        yield pid
        try:
            # The name, in parentheses, may contain anything; the parent is the second word after it.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _described(row: GpuProcess) -> ForeignProcess:
    """A process with its user and program, if these are visible from here."""
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
