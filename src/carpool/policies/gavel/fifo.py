"""Gavel's FIFO: in order of arrival, each job on the fastest device type with room for its gang.

With `perf=False` it reproduces a bug of Gavel's simulator. Its code means to draw a random device type with room, but
reads the type from a variable that an earlier loop left at the last type by name with any room, whether or not the gang
fits; the draw only removes a type from the list. So types are overbooked, and the jobs on them alternate. A job keeps
its type; when it ends, the head of the queue takes it over if it fits the room counted so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Job, JobId, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.gavel.rounds import (
    Timetable,
    apply_round,
    capacity_of,
    is_stale,
    next_round,
    rates_of,
    received_s,
    schedule_round,
)
from carpool.policies.registry import register

Rates = Sequence[tuple[Job, Mapping[Kind, float]]]


def leftover_kinds(
    rates: Rates, capacity: Mapping[Kind, int], memory: Mapping[str, Any], seed: int
) -> tuple[dict[JobId, Kind], dict[str, Any]]:
    """The type of each job that has one, and the state for the next call: types, and sizes of all draws so far.

    `rates` is in order of arrival. All draws are repeated each time, so that one random stream lasts for the run.
    """
    random = Random(seed)
    draws: list[int] = list(memory.get("draws", ()))
    for size in draws:
        random.randrange(size)
    there = {job.id: (job, speeds) for job, speeds in rates}
    held: dict[JobId, Kind] = dict(memory.get("kinds", {}))
    order: list[JobId] = list(memory.get("order", ()))
    room = dict(capacity)
    queue = [entry for entry in rates if entry[0].id not in held]
    kinds = _inherited(there, held, order, room, queue)
    names = sorted([kind for kind in room if room[kind] > 0], key=str.casefold)
    while queue and names:
        job, speeds = queue.pop(0)
        width = job.spec.devices
        fitting = [place for place, kind in enumerate(names) if room[kind] >= width]
        if not fitting:
            break
        kind = names[-1]
        draws.append(len(fitting))
        struck = fitting[random.randrange(len(fitting))]
        if speeds[kind] > 0.0:
            kinds[job.id] = kind
            room[kind] -= width
            if room[kind] == 0:
                names.pop(struck)
    arrived = [job.id for job, _ in rates]
    return kinds, {"draws": draws, "kinds": kinds, "order": [job for job in arrived if job in kinds]}


def _inherited(
    there: Mapping[JobId, tuple[Job, Mapping[Kind, float]]],
    held: Mapping[JobId, Kind],
    order: Sequence[JobId],
    room: dict[Kind, int],
    queue: list[tuple[Job, Mapping[Kind, float]]],
) -> dict[JobId, Kind]:
    """Types that stay, and types of completed jobs that the head of the queue takes over, in order of arrival."""
    kinds: dict[JobId, Kind] = {}
    for old in order:
        kind = held[old]
        if old in there:
            kinds[old] = kind
            room[kind] -= there[old][0].spec.devices
        elif queue:
            job, speeds = queue[0]
            if job.spec.devices <= room.get(kind, 0) and speeds[kind] > 0.0:
                kinds[job.id] = kind
                room[kind] -= job.spec.devices
                queue.pop(0)
    return kinds


@register("gavel-fifo")
@dataclass(frozen=True, slots=True)
class GavelFifo(Policy):
    """First come, first served on heterogeneous devices (fifo_perf of Narayanan et al., OSDI 2020).

    The first job that fits nowhere blocks; one that fits only where it makes no progress is skipped. `perf=False`
    reproduces the plain `fifo` of Gavel's simulator, with its bug.
    """

    keeps_running_order: ClassVar[bool] = True

    replan: bool = True  # whether running jobs move when a faster type has room; else they stay until they end
    recompute_s: float = 0.0  # least time between two decisions; jobs that arrive in between wait (Gavel: 1920)
    perf: bool = True  # whether rates by kind are used; False: a reproduction, not a policy to use
    turn_s: float = 360.0  # length of a turn when perf=False assigns more devices than exist
    seed: int = 0  # of the draws when perf=False

    def __post_init__(self) -> None:
        if not self.turn_s > 0.0:
            raise InputError(f"turn_s is {self.turn_s}", way_out="Give a number of seconds above 0.")

    def plan(self, view: Snapshot) -> Plan:
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
        running = apply_round(draft, seen, chosen)
        note = table.as_note() if table is not None else None
        return draft.finish(f"the first {running} jobs run on their fastest device types with room", note=note)

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
        chosen = schedule_round(view, table, rates, list(capacity), self.turn_s / 2.0, only_due=True)
        draft = Draft(view)
        running = apply_round(draft, active, chosen)
        note = None if table is old else table.as_note()
        reason = f"round of {running} of {len(active)} jobs, device types as of {table.at:.0f} s"
        return draft.finish(reason, wake_at=next_round(view.at, self.turn_s, table.at + self.recompute_s), note=note)


def _fastest(rates: Mapping[Kind, float], room: Mapping[Kind, int], width: int) -> Kind | None:
    """The fastest type with room; the first on ties."""
    fitting = [kind for kind, rate in rates.items() if rate > 0.0 and room[kind] >= width]
    return max(fitting, key=lambda kind: rates[kind], default=None)
