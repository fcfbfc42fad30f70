"""Round-based execution of time shares: in each round the jobs furthest behind run on each device type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.core.draft import Draft
from carpool.core.model import Job, JobId, Kind
from carpool.core.placement import consolidated, emptiest
from carpool.core.policy import Snapshot
from carpool.policies.estimator_queries import rate_on

Seconds = dict[Kind, float]


@dataclass(frozen=True, slots=True)
class Timetable:
    """The share of its time each job is due on each type, and what it had received when that was computed."""

    at: float
    capacity: dict[Kind, int]  # when it was made
    due: dict[JobId, dict[Kind, float]]
    had_s: dict[JobId, Seconds]
    memory: dict[str, Any] = field(default_factory=dict)  # state of the policy that made it

    @classmethod
    def of_note(cls, note: object) -> Timetable | None:
        return cls(**note) if isinstance(note, dict) else None

    def as_note(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("at", "capacity", "due", "had_s", "memory")}


def capacity_of(view: Snapshot) -> dict[Kind, int]:
    """Usable devices of each type."""
    return view.occupancy.usable_devices


def rates_of(view: Snapshot, job: Job, capacity: Mapping[Kind, int]) -> dict[Kind, float]:
    """The job's estimated rate on each type with its full gang; 0 where it cannot run."""
    width, kinds = job.spec.devices, view.kinds_for(job)
    return {
        kind: rate_on(view, job.spec, kind) if width <= count and kind in kinds else 0.0
        for kind, count in capacity.items()
    }


def received_s(view: Snapshot, job: Job) -> Seconds:
    """Seconds, not device-seconds, that the job has run on each type."""
    return {kind: device_s / job.spec.devices for kind, device_s in view.service(job)}


def is_stale(view: Snapshot, table: Timetable | None, jobs: Iterable[Job], recompute_s: float) -> bool:
    """Whether jobs or devices have changed since the timetable was made and it is old enough to be replaced.

    With nothing running it always is, so that new jobs never face idle devices. So is one made at instant 0, as in
    Gavel's simulator, where 0 also stands for never.
    """
    if table is None:
        return True
    if table.due.keys() == {job.id for job in jobs} and table.capacity == capacity_of(view):
        return False
    return view.at - table.at >= recompute_s or table.at == 0.0 or not len(view.running_jobs)


def next_round(at: float, turn_s: float, recompute_at: float) -> float:
    """When to plan next if nothing happens: at the end of the round, or when new jobs may be included."""
    return min(at + turn_s, recompute_at) if recompute_at > at else at + turn_s


def schedule_round(
    view: Snapshot,
    table: Timetable,
    rates: Sequence[tuple[Job, Mapping[Kind, float]]],
    kinds: Sequence[Kind],
    credit_s: float,
    *,
    only_due: bool = False,
) -> dict[JobId, Kind]:
    """Assign each type in turn to the jobs furthest behind on it.

    Priority of job j on type k: due[j, k] / (seconds received on k since the timetable was made + credit_s). A gang
    that does not fit is skipped. `only_due` leaves devices idle rather than assign them to jobs not due there.
    """
    room = dict(view.occupancy.free_devices)  # plus what these jobs hold
    for job, _ in rates:
        if job.desired is not None:
            for kind, count in view.cluster.groups_of(job.desired):
                room[kind] += count
    since = {job.id: _since(view, table, job) for job, _ in rates if job.id in table.due}
    chosen: dict[JobId, Kind] = {}
    for kind in kinds:
        ranked: list[tuple[float, float, int, Job]] = []
        for job, speeds in rates:
            due = table.due.get(job.id)
            if due is None or job.id in chosen or speeds[kind] <= 0.0 or (only_due and due.get(kind, 0.0) <= 0.0):
                continue
            part = due.get(kind, 0.0)
            ranked.append((-part / (since[job.id].get(kind, 0.0) + credit_s), -part, job.seq, job))
        ranked.sort(key=lambda row: row[:3])
        for _, _, _, job in ranked:
            if job.spec.devices <= room[kind]:
                room[kind] -= job.spec.devices
                chosen[job.id] = kind
    return chosen


def apply_round(draft: Draft, jobs: Iterable[Job], chosen: Mapping[JobId, Kind]) -> int:
    """Put every job on its type and release the others; returns how many run.

    A job on its type already stays. The others follow, largest first, consolidated if possible, else over as few
    nodes as possible.
    """
    cluster = draft.view.cluster
    movers: list[Job] = []
    for job in jobs:
        kind = chosen.get(job.id)
        if job.desired is not None:
            there = {held for held, _ in cluster.groups_of(job.desired)}
            if there == {kind} and job.desired.num_devices == job.spec.devices:
                continue
            draft.release(job)
        if kind is not None:
            movers.append(job)
    for job in sorted(movers, key=lambda job: (-job.spec.devices, job.seq)):
        kinds = (chosen[job.id],)
        placed = draft.place(job, kinds=kinds, rule=consolidated) or draft.place(job, kinds=kinds, rule=emptiest)
        assert placed or cluster.nodes_for(job.spec), (
            f"{job.spec.devices} devices of kind {kinds[0]} were counted as free for job {job.id!r}"
        )
    return len(chosen)


def _since(view: Snapshot, table: Timetable, job: Job) -> Seconds:
    had = table.had_s.get(job.id, {})
    return {kind: seconds - had.get(kind, 0.0) for kind, seconds in received_s(view, job).items()}
