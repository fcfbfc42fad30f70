"""Scaling: decides which machines of an engine to release, and how many to request; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class NodeUse(NamedTuple):
    """A machine that is in use by the scheduler."""

    name: str
    devices: int
    free: int  # devices without a job
    is_drained: bool = False

    @property
    def is_idle(self) -> bool:
        return self.free == self.devices


class Scaling(NamedTuple):
    """A decision for the engine."""

    release: tuple[str, ...]  # idle machines that are not needed
    nodes: int  # machines wanted in all
    is_short: bool  # jobs wait for machines


@dataclass(slots=True)
class Scaler:
    """Releases machines that are drained or have been idle for long, and requests as many as waiting jobs need."""

    idle_s: float = 0.0  # release a machine that has been idle this long; 0: never
    _idle_since: dict[str, float] = field(default_factory=dict)
    _missing: int = 0  # machines, at the last decision

    def decide(self, now: float, nodes: Sequence[NodeUse], waiting: Iterable[int], size: int) -> Scaling:
        """Decide from the machines in use, the fewest devices of each job in `waiting` and the `size` of a new machine.

        A machine is requested only if it was missing in two successive decisions: a job that has just arrived may start
        with the next plan.
        """
        usable = [node for node in nodes if not node.is_drained]
        unmet = missing_nodes([node.free for node in usable], waiting, size)
        idle = {node.name for node in nodes if node.is_idle}
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        release = [node.name for node in nodes if node.is_drained and node.is_idle]
        if self.idle_s and not unmet.jobs:
            due = [node.name for node in usable if now - self._idle_since.get(node.name, now) >= self.idle_s]
            release += due
            usable = [node for node in usable if node.name not in due]
        asked = min(unmet.nodes, self._missing)
        self._missing = unmet.nodes
        return Scaling(tuple(release), len(usable) + asked, asked > 0)


class Unmet(NamedTuple):
    """Jobs that wait, and the machines that they lack."""

    jobs: int
    nodes: int


def missing_nodes(free: Sequence[int], waiting: Iterable[int], size: int) -> Unmet:
    """How many machines of a size are missing for jobs that fit none of the free devices, packed first fit."""
    room, new, jobs = sorted(free), 0, 0
    for need in waiting:
        jobs += 1
        while need > 0:
            part = min(need, size)
            place = next((place for place, left in enumerate(room) if left >= part), None)
            if place is None:
                new += 1
                room.append(size)
                place = len(room) - 1
            room[place] -= part
            need -= part
    return Unmet(jobs, new)
