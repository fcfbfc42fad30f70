"""A policy for measuring: all jobs on one device, at one equal share after another, each held for a while.

    carpool run jobs.toml --devices cuda:0 --policy benchmarks/sharing/walk.py:Walk:levels=0.33/0.5/1.0:hold_s=3

What is held is told in the reasons of its plans: ``holds 33% each``, and ``keeps`` after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.messages import AssignApplied
from carpool.core.model import Allocation, DeviceId
from carpool.core.policy import ARRIVALS_AND_ENDINGS, Cadence, Plan, Policy, Snapshot

_PATIENCE_S = 5.0  # between looks at orders that do not hold yet


@dataclass(frozen=True, slots=True)
class Walk(Policy):
    """Equal shares, one level after the other; a level's time begins when all jobs run at it."""

    cadence: ClassVar[Cadence] = Cadence(ARRIVALS_AND_ENDINGS | {AssignApplied})
    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 16.0

    levels: tuple[float, ...] = (0.33, 0.4, 0.5, 0.6, 0.8, 1.0)
    hold_s: float = 3.0

    def plan(self, view: Snapshot) -> Plan:
        """Begin with the first level, and go on to the next when one has been held for long enough."""
        place, since = view.note if isinstance(view.note, (list, tuple)) else (-1, None)
        draft = Draft(view)
        waits = list(draft.waiting())
        if place < 0 or waits:
            return self._go_to(draft, max(place, 0))
        if any(job.is_starting for job in view.running()):
            return draft.finish("not all hold their share yet", wake_at=view.at + _PATIENCE_S, note=[place, None])
        if since is None:
            return draft.finish("all hold their share", wake_at=view.at + self.hold_s, note=[place, view.at])
        if place >= len(self.levels):
            return Plan.NOTHING
        if view.at < since + self.hold_s:
            return draft.finish("held", wake_at=since + self.hold_s, note=[place, since])
        if place + 1 == len(self.levels):
            return draft.finish("keeps the last share", note=[place + 1, since])
        return self._go_to(draft, place + 1)

    def _go_to(self, draft: Draft, place: int) -> Plan:
        level = self.levels[place]
        for job in [*draft.waiting(), *draft.view.running()]:
            draft.assign(job, Allocation.of(DeviceId(0), fraction=level))
        return draft.finish(f"holds {level:.0%} each", wake_at=draft.view.at + _PATIENCE_S, note=[place, None])
