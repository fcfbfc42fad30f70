"""Gavel's first in, first out: in order of arrival, each job on the fastest kind that still has room for its gang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, JobId, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.gavel_leftover import leftover_kinds
from carpool.policies.gavel_turns import (
    Timetable,
    capacity_of,
    is_stale,
    move,
    next_turn,
    rates_of,
    received_s,
    take_turns,
)
from carpool.policies.registry import register


@register("gavel-fifo")
@dataclass(frozen=True, slots=True)
class GavelFifo(Policy):
    """Order of arrival on unlike kinds (fifo_perf of Narayanan et al., OSDI 2020); the first that fits nowhere blocks.

    A job that fits only on kinds where it makes no progress is passed over.

    `perf=False` reproduces the plain `fifo` of Gavel's simulator with a slip in its code: see `gavel_leftover`.
    """

    keeps_running_order: ClassVar[bool] = True

    replan: bool = True  # whether running jobs move when a faster kind has room; else they stay to their end
    recompute_s: float = 0.0  # least time between two decisions; jobs that arrive in between wait (Gavel: 1920)
    perf: bool = True  # whether rates by kind are used; False: a reproduction, not a policy to use
    turn_s: float = 360.0  # length of a turn where perf=False gives out more devices than there are
    seed: int = 0  # of the draws when perf=False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if not self.turn_s > 0.0:
            raise InputError(f"turn_s is {self.turn_s}", way_out="Give a number of seconds above 0.")

    def plan(self, view: Snapshot) -> Plan:
        """Give each job in order of arrival its kind, until one fits nowhere."""
        if not self.perf:
            return self._plan_as_listed(view)
        if not self.recompute_s:
            return self._place(view, None)
        old = Timetable.of_note(view.note)
        active = list(view.active())
        if not is_stale(view, old, active, self.recompute_s):
            if old is None or old.due.keys() == {job.id for job in active}:
                return Plan.NOTHING
            return Plan(wake_at=old.at + self.recompute_s)
        return self._place(view, Timetable(view.at, capacity_of(view), {job.id: {} for job in active}, {}))

    def _place(self, view: Snapshot, table: Timetable | None) -> Plan:
        draft = Draft(view)
        capacity = capacity_of(view)
        room = dict(capacity) if self.replan else dict(view.occupancy.free_devices)
        chosen: dict[JobId, Kind] = {}
        seen: list[Job] = []
        for job in draft.in_order() if self.replan else draft.waiting():
            rates = rates_of(view, job, capacity)
            kind = _fastest(rates, room, job.spec.devices)
            if kind is not None:
                room[kind] -= job.spec.devices
                chosen[job.id] = kind
                seen.append(job)
            elif max(room.values()) < job.spec.devices:
                break
        if self.replan:
            seen = [*(job for job in view.running() if job.id not in chosen), *seen]
        running = move(draft, seen, chosen)
        note = table.as_note() if table is not None else None
        return draft.finish(f"{running} first in order of arrival on their fastest kinds with room", note=note)

    def _plan_as_listed(self, view: Snapshot) -> Plan:
        capacity = capacity_of(view)
        active = sorted(view.active(), key=lambda job: job.seq)
        rates = [(job, rates_of(view, job, capacity)) for job in active]
        if not rates:
            return Plan.NOTHING
        table = old = Timetable.of_note(view.note)
        if table is None or is_stale(view, table, active, self.recompute_s):
            kinds, memory = leftover_kinds(rates, capacity, old.memory if old is not None else {}, self.seed)
            due = {job.id: {kinds[job.id]: 1.0} if job.id in kinds else {} for job in active}
            table = Timetable(view.at, capacity, due, {job.id: received_s(view, job) for job in active}, memory)
        chosen = take_turns(view, table, rates, list(capacity), self.turn_s / 2.0, only_due=True)
        draft = Draft(view)
        running = move(draft, active, chosen)
        note = None if table is old else table.as_note()
        reason = f"turn of {running} of {len(active)} jobs, kinds as of {table.at:.0f} s"
        return draft.finish(reason, wake_at=next_turn(view.at, self.turn_s, table.at + self.recompute_s), note=note)


def _fastest(rates: Mapping[Kind, float], room: Mapping[Kind, int], width: int) -> Kind | None:
    """The kind with the highest rate among those with room; the first of them on ties."""
    fitting = [kind for kind, rate in rates.items() if rate > 0.0 and room[kind] >= width]
    return max(fitting, key=lambda kind: rates[kind], default=None)
