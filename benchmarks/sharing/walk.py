"""Policy for measuring: `competitive` chooses shares, then equal ones are held in turn.

    carpool run jobs.toml --devices cuda:0 --policy benchmarks/sharing/walk.py:Compared:walk=0.33/0.5/1.0:hold_s=3

The reasons of its plans say what is held: ``keeps 80%/33% on local:0, measured 0.82``, then ``holds 33% each`` and so
on, and ``walked through all`` at the end. The time of a level starts when all jobs run at it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from carpool.core.draft import Draft
from carpool.core.model import Allocation, DeviceId
from carpool.core.policy import Plan, Snapshot
from carpool.policies.sharing.competitive import Competitive

_PATIENCE_S = 5.0  # between looks at orders that do not hold yet


@dataclass(frozen=True, slots=True)
class Compared(Competitive):
    """The chosen shares for `hold_s`, then equal ones, one level after the other."""

    walk: tuple[float, ...] = (0.33, 0.4, 0.5, 0.6, 0.8, 1.0)
    hold_s: float = 3.0

    def plan(self, view: Snapshot) -> Plan:
        """As `competitive` does until it keeps a vector; from then on the note is a place in the walk, and since when.

        The place before the first level is that of the chosen shares.
        """
        if isinstance(view.note, (list, tuple)):
            place, since = view.note
            return self._go_on(view, place, since)
        plan = Competitive.plan(self, view)
        if "keeps" not in plan.reason:
            return plan
        if plan.changes:
            return replace(plan, note=[-1, None], wake_at=view.at + _PATIENCE_S)
        return replace(plan, note=[-1, view.at], wake_at=view.at + self.hold_s)

    def _go_on(self, view: Snapshot, place: int, since: float | None) -> Plan:
        draft = Draft(view)
        if any(job.is_starting for job in view.running()):
            return draft.finish("not all hold their share yet", wake_at=view.at + _PATIENCE_S, note=[place, None])
        if since is None:
            return draft.finish("all hold their share", wake_at=view.at + self.hold_s, note=[place, view.at])
        if place >= len(self.walk):
            return Plan.NOTHING
        if view.at < since + self.hold_s:
            return draft.finish("shares are held", wake_at=since + self.hold_s, note=[place, since])
        if place + 1 == len(self.walk):
            return draft.finish("walked through all", note=[place + 1, since])
        level = self.walk[place + 1]
        for job in list(view.running()):
            draft.assign(job, Allocation.of(DeviceId(0), fraction=level))
        return draft.finish(f"holds {level:.0%} each", wake_at=view.at + _PATIENCE_S, note=[place + 1, None])
