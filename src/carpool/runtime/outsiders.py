"""Other people's programs on our GPUs, found while jobs run: seen, said, and given the memory that only waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from carpool.runtime.devices import LocalDevice
from carpool.runtime.gpus import Gpu, visible
from carpool.runtime.nvml import Computing, Nvml

EVERY_S = 5.0  # the driver answers within a millisecond
_DEEPEST = 64  # generations of processes between one of ours and us

Ask = Callable[[int], "list[Computing] | None"]  # by the number CUDA gives a GPU


class Lookout:
    """Looks at our GPUs every few seconds."""

    def __init__(
        self,
        gpus: Mapping[int, LocalDevice],
        clock: Callable[[], float],
        ask: Ask | None = None,  # else the driver is asked
        is_ours: Callable[[int], bool] | None = None,
    ) -> None:
        self._gpus = gpus
        self._clock = clock
        self._ask = ask
        self._is_ours = is_ours or _is_ours
        self._next_at = clock() + EVERY_S
        self._found: dict[int, frozenset[int]] = {}

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
            self._ask = asker()
        return [(number, words) for number in self._gpus if (words := self._look(number, is_used=number in here))]

    def _look(self, number: int, *, is_used: bool) -> str:
        place, before = self._gpus[number], self._found.get(number, frozenset())
        assert self._ask is not None
        assert place.cuda is not None
        rows = self._ask(place.cuda)
        if rows is None:
            return ""
        others = [row for row in rows if not self._is_ours(row.pid)]
        if is_used and len(others) == len(rows):
            return ""  # we compute there and are not listed: the driver numbers processes otherwise than we do
        now = self._found[number] = frozenset(row.pid for row in others)
        if new := [row for row in others if row.pid not in before]:
            who = ", ".join(_described(row) for row in new)
            return f"somebody else computes on {place.name}: {who}. Times measured meanwhile are not ours alone."
        return f"nobody else computes on {place.name} any more" if before and not now else ""


def asker() -> Ask:
    """Asks the driver; where there is none, nothing is ever told."""
    nvml = Nvml.open()
    if nvml is None:
        return lambda index: None
    driver = nvml
    listed = [Gpu(place, "", uuid=driver.uuid(place)) for place in range(driver.count())]
    places = [gpu.uuid for gpu in listed]
    seen = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def ask(index: int) -> list[Computing] | None:
        return driver.computing(places.index(seen[index].uuid)) if index < len(seen) else None

    return ask


def _is_ours(pid: int) -> bool:
    return is_descendant(pid) or _serves_us(pid)


def _serves_us(pid: int) -> bool:
    """Whether a process is a server of the MPS daemon that this one started: it may have left its parents."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    folders = [
        each.partition(b"=")[2].decode(errors="replace") for each in variables if each.startswith(b"CUDA_MPS_PIPE")
    ]
    return any(Path(folder).parent.name.partition(".")[0] == str(os.getpid()) for folder in folders)


def is_descendant(pid: int) -> bool:
    """Whether a process was started by this one, or by one that was."""
    for _ in range(_DEEPEST):
        if pid == os.getpid():
            return True
        if pid <= 1:
            return False
        try:
            # The name, in parentheses, may hold anything; the parent is the second word behind it.
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


def _described(row: Computing) -> str:
    try:
        name = Path(f"/proc/{row.pid}/comm").read_text(errors="replace").strip()
    except OSError:
        name = ""
    words = f"process {row.pid}" + (f" ({name})" if name else "")
    return words + (f" with {row.memory_bytes / 2**30:.1f} GiB" if row.memory_bytes else "")
