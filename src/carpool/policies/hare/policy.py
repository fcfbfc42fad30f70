"""Hare: allocates devices by the job values and device prices of a linear relaxation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from operator import neg
from typing import Any, ClassVar

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError, Overbooked
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.placement import consolidated, pooled
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import in_submission_order
from carpool.core.topology import Placement
from carpool.policies.estimator_queries import rate_on
from carpool.policies.gavel.rounds import capacity_of
from carpool.policies.hare.device_allocation import (
    STAY,
    Bid,
    Counts,
    DeviceAllocator,
    DeviceCounts,
    GapFill,
    held_counts,
)
from carpool.policies.hare.relaxation import Demand, Floats, solve, worth_at
from carpool.policies.registry import register

_GUESS = 300.0  # units of work of a job of unknown length
_FEW = 60  # jobs up to which the relaxation is solved at every arrival
_TIE_S = 1e-6  # a sum of times may round below the requested wake time
_LOOK_S = 2.0  # between plans while a job waits and the gaps of a running one are not measured yet
_SHORTEST_S = 0.1  # least length of a job in the relaxation


@register("hare")
@dataclass(frozen=True, slots=True)
class Hare(Policy):
    """Assign devices by the job values and device prices of the linear relaxation (`relaxation`).

    A device of type k brings job n u_n·s_nk − π_k per second. In that order (1) each job holds its full size on its
    most profitable type; (2) jobs without room take fewer devices, or another type, if that about pays; (3)
    remaining devices go where they speed up most, of several types if need be, but not to a job for which they are
    more than `slower` times slower than its best; (4) jobs without devices run in the gaps of steps that span
    device types. A job that has waited `patience_s` goes first until it ends, so no job starves.

    Without a solution, or with more than `most_jobs` jobs, the order is WSPT: u_n = weight over remaining device-
    seconds, and devices have no price. With `lengths=unknown` a job is taken to have `guess` units of work plus as
    much as it has done.
    """

    shares_devices: ClassVar[bool] = True
    max_virtual: ClassVar[float] = 2.0

    every_s: float = 30.0  # least time between two solutions; jobs in between use the old prices
    intervals: int = 12  # of the relaxation
    most_jobs: int = 600  # that the relaxation is asked for
    slower: float = 2.5
    patience_s: float = 3600.0
    lengths: str = "known"
    guess: float = _GUESS
    gaps: bool = True  # whether jobs run in the gaps of others

    def __post_init__(self) -> None:
        if self.lengths not in ("known", "unknown"):
            raise InputError(f"lengths is {self.lengths!r}", way_out="Give lengths=known or lengths=unknown.")
        for name, value, least in (("intervals", self.intervals, 2), ("slower", self.slower, 1.0)):
            if value < least:
                raise InputError(f"{name} is {value}", way_out=f"Give at least {least}.")
        if not (self.guess > 0.0 and self.patience_s > 0.0):
            raise InputError(f"guess is {self.guess}, patience_s {self.patience_s}", way_out="Give more than 0.")

    def plan(self, view: Snapshot) -> Plan:
        capacity = capacity_of(view)
        jobs, demand = demand_of(view, capacity, self.guess if self.lengths == "unknown" else 0.0)
        if not jobs:
            return Plan.NOTHING
        beliefs = self._beliefs(view, jobs, demand, capacity)
        late_s = {job.id: self._waited_s(view, job) + _TIE_S - self.patience_s for job in jobs}
        dealt = self._deal(view, _bids(view, jobs, demand, beliefs, capacity), beliefs, late_s, capacity)
        draft = Draft(view)
        _carry_out(draft, dealt)
        waiting = [job.id for job in jobs if draft.holding(job) is None]
        wake_s = min([_TIE_S - late_s[job] for job in waiting if late_s[job] < 0.0], default=inf)
        if waiting and self.gaps and _is_measuring(view, dealt):
            wake_s = min(wake_s, _LOOK_S)
        plan = draft.finish(
            _reason(dealt, len(jobs)),
            wake_at=view.at + wake_s if wake_s < inf else None,
            note=None if beliefs.at < view.at else beliefs.as_note(),
        )
        return plan if plan.changes or plan.wake_at or plan.note else Plan.NOTHING

    def _beliefs(self, view: Snapshot, jobs: Sequence[Job], demand: Demand, capacity: Mapping[Kind, int]) -> Beliefs:
        """The last solution, or a new one when it is old or the devices have changed."""
        old = Beliefs.of_note(view.note)
        if old is not None and old.capacity == capacity:
            news = len(jobs) <= _FEW and any(job.id not in old.worth for job in jobs)
            if not news and view.at < old.at + self.every_s:
                return old
        if len(jobs) > self.most_jobs:
            return Beliefs(view.at, dict(capacity))
        found = solve(demand, self.intervals)
        if not found.optimal:
            return Beliefs(view.at, dict(capacity))
        density = demand.weights / demand.work
        worth = {job.id: (float(u), float(r)) for job, u, r in zip(jobs, found.worth, density, strict=True)}
        return Beliefs(view.at, dict(capacity), worth, found.edges.tolist(), found.prices.tolist())

    def _waited_s(self, view: Snapshot, job: Job) -> float:
        """Age less the time in which the job would have received its service at full size."""
        return view.at - job.submitted_at - view.attained_s(job) / job.spec.widest

    def _deal(
        self,
        view: Snapshot,
        bids: Sequence[Bid],
        beliefs: Beliefs,
        late_s: Mapping[JobId, float],
        capacity: Mapping[Kind, int],
    ) -> DeviceCounts:
        """Go through the jobs in order, once for each of the four ways to get devices."""
        prices = beliefs.prices_at(view.at)
        dealing = DeviceAllocator(view, capacity, prices, self.slower)
        dealt = dealing.dealt
        for bid in bids:
            if late_s[bid.job.id] >= 0.0:
                dealing.first(bid)
        ways = [dealing.hold, dealing.pay, dealing.fill]
        ordered = sorted(bids, key=lambda bid: -dealing.best_gain(bid))
        for way in ways:
            for bid in ordered:
                if dealt.counts(bid.job.id) is None:
                    way(bid)
        if self.gaps:
            leaders = [(bid.job, counts) for bid in ordered if (counts := dealt.counts(bid.job.id)) and len(counts) > 1]
            for bid in ordered:
                if leaders and dealt.counts(bid.job.id) is None:
                    dealing.fill_gaps(bid, leaders)
        return dealt


@dataclass(frozen=True, slots=True)
class Beliefs:
    """The last solution of the relaxation; without values, jobs go by WSPT."""

    at: float
    capacity: dict[Kind, int]
    worth: dict[JobId, tuple[float, float]] = field(default_factory=dict)  # u and w/V then
    edges: list[float] = field(default_factory=list)
    prices: list[list[float]] = field(default_factory=list)  # by kind and interval

    @classmethod
    def of_note(cls, note: object) -> Beliefs | None:
        if not isinstance(note, dict):
            return None
        given: dict[str, Any] = note
        worth = {job: (u, density) for job, (u, density) in given["worth"].items()}
        return cls(given["at"], given["capacity"], worth, given["edges"], given["prices"])

    def as_note(self) -> dict[str, Any]:
        worth = {job: list(pair) for job, pair in self.worth.items()}
        return {"at": self.at, "capacity": self.capacity, "worth": worth, "edges": self.edges, "prices": self.prices}

    def prices_at(self, at: float) -> dict[Kind, float]:
        """Price of a device-second of each type now."""
        if not self.prices:
            return dict.fromkeys(self.capacity, 0.0)
        place = min(bisect_right(self.edges, at - self.at), len(self.edges) - 1) - 1
        return {kind: row[place] for kind, row in zip(self.capacity, self.prices, strict=True)}

    def worths(self, at: float, jobs: Sequence[Job], demand: Demand) -> Floats:
        """Value of a unit of each job's work now: as solved, or for later jobs at the prices of then."""
        if not self.prices:
            return np.asarray(demand.weights / demand.work, dtype=np.float64)
        elapsed_s = at - self.at
        values = worth_at(demand, np.array(self.edges), np.array(self.prices), elapsed_s)
        for place, job in enumerate(jobs):
            known = self.worth.get(job.id)
            if known is not None:
                values[place] = known[0] - elapsed_s * known[1]
        return values


def demand_of(view: Snapshot, capacity: Mapping[Kind, int], guess: float = 0.0) -> tuple[list[Job], Demand]:
    """The jobs that can run on the usable devices, in order of submission, and what they need.

    With `guess` above 0, lengths are ignored: a job is taken to have that much work left plus what it has done.
    """
    kinds = list(capacity)
    jobs: list[Job] = []
    rows: list[list[float]] = []
    for job in sorted(view.active(), key=lambda job: job.seq):
        allowed = view.kinds_for(job)
        speeds = [_speed(view, job, kind, capacity[kind]) if kind in allowed else 0.0 for kind in kinds]
        room = sum([capacity.get(kind, 0) for kind in allowed])
        if max(speeds, default=0.0) > 0.0 and room >= job.spec.narrowest:
            if all(capacity[kind] < job.spec.narrowest for kind in allowed if kind in capacity):
                speeds = _speeds_across(view, job, kinds, speeds, capacity)
            jobs.append(job)
            rows.append(speeds)
    table = np.array(rows).reshape(len(jobs), len(kinds))
    widths = np.array([min(job.spec.widest, sum(capacity.values())) for job in jobs], dtype=float)
    shortest = _SHORTEST_S * widths * table.max(axis=1, initial=0.0)
    work = np.array([_remaining(view, job, guess) for job in jobs])
    weights = np.array([job.spec.weight for job in jobs])
    there = np.array([float(capacity[kind]) for kind in kinds])
    return jobs, Demand(table, widths, np.maximum(work, shortest), weights, there, np.zeros(len(jobs)))


def _remaining(view: Snapshot, job: Job, guess: float) -> float:
    """Units of work left, known or guessed."""
    left = inf if guess else view.estimates.remaining(job, view.at).mean
    return left if left < inf else (guess or _GUESS) + job.done_at(view.at)


def _bids(
    view: Snapshot, jobs: Sequence[Job], demand: Demand, beliefs: Beliefs, capacity: Mapping[Kind, int]
) -> list[Bid]:
    bids: list[Bid] = []
    worths = [float(worth) for worth in beliefs.worths(view.at, jobs, demand)]
    for place, worth in enumerate(in_submission_order(jobs, worths, key=neg)):
        job = jobs[place]
        speeds = {kind: float(s) for kind, s in zip(capacity, demand.speeds[place], strict=True) if s > 0.0}
        widths = {kind: min(job.spec.widest, capacity[kind]) for kind in speeds}
        stay = STAY * (1.0 + _move_cost(view, job, speeds, float(demand.work[place])))
        bids.append(Bid(job, worth, speeds, widths, stay))
    return bids


def _move_cost(view: Snapshot, job: Job, speeds: Mapping[Kind, float], work: float) -> float:
    """The stall of a move over the time that a running job has left where it is."""
    rate = sum([speeds.get(kind, 0.0) * count for kind, count in held_counts(view, job)])
    move_s = view.estimates.move_s(job.spec) or 0.0
    return move_s * rate / work if rate > 0.0 else 0.0


def _speed(view: Snapshot, job: Job, kind: Kind, there: int) -> float:
    """Units of work per device-second on as many devices of a type as the job may use."""
    width = min(job.spec.widest, there)
    return rate_on(view, job.spec, kind, width) / width if width else 0.0


def _speeds_across(
    view: Snapshot, job: Job, kinds: Sequence[Kind], speeds: Sequence[float], capacity: Mapping[Kind, int]
) -> list[float]:
    """The speeds of a job that fits on no single type, scaled to add up to its rate across types."""
    left, counts, sum_of_speeds = job.spec.widest, list[tuple[Kind, int]](), 0.0
    for speed, kind in sorted(zip(speeds, kinds, strict=True), reverse=True):
        count = min(left, capacity[kind]) if speed > 0.0 else 0
        if count:
            counts.append((kind, count))
            left, sum_of_speeds = left - count, sum_of_speeds + count * speed
    rate = view.estimates.rate(job.spec, Placement(tuple(sorted(counts)))).mean
    return [speed * rate / sum_of_speeds for speed in speeds] if rate > 0.0 else list(speeds)


def _carry_out(draft: Draft, dealt: DeviceCounts) -> None:
    """Apply the counts; jobs that hold theirs already stay."""
    view = draft.view
    running = list(view.running())
    stay = {job.id for job in running if dealt.counts(job.id) == held_counts(view, job)}
    stay |= {
        job.id
        for job in running
        if (filling := dealt.fillings.get(job.id)) and filling.leader in stay and _fills(job, view, filling)
    }
    for job in running:
        if job.id not in stay:
            draft.release(job)
    for owners in (dealt.first, dealt.held, dealt.filled):
        for name, counts in owners.items():
            if name not in stay:
                _place(draft, view.jobs[name], counts)
    for name, filling in dealt.fillings.items():
        if name not in stay:
            _place_in_gaps(draft, view.jobs[name], filling)


def _is_measuring(view: Snapshot, dealt: DeviceCounts) -> bool:
    """Whether the gaps of a job on several device types will be known soon."""
    if not view.estimates.measures_idle:
        return False
    several = [job for job in view.active() if len(dealt.counts(job.id) or ()) > 1]
    return any(not view.estimates.idle(job.spec, dealt.counts(job.id) or ()) for job in several)


def _fills(job: Job, view: Snapshot, filling: GapFill) -> bool:
    """Whether a job runs in the gaps it was assigned."""
    held, leading = job.desired, view.jobs[filling.leader].desired
    if held is None or leading is None or not held.shares[0].turn or held.num_devices != filling.num_devices:
        return False
    return set(held.devices()) <= set(leading.devices())


def _place(draft: Draft, job: Job, counts: Counts) -> None:
    """Place a job on free devices of each type, on as few nodes as possible."""
    runs: list[range] = []
    for kind, count in counts:
        found = draft.find(job, count, kinds=(kind,), rule=consolidated)
        found = found or draft.find(job, count, kinds=(kind,), rule=pooled)
        if found is None:
            return  # a device's memory may be too small, which counts do not show
        runs += [share.devices for share in found.shares]
    draft.assign(job, Allocation.exclusive(tuple(sorted(runs, key=lambda run: run.start))))


def _place_in_gaps(draft: Draft, job: Job, filling: GapFill) -> None:
    """Place a job on devices of its leader, at a later turn."""
    leading = draft.holding(draft.view.jobs[filling.leader])
    if leading is None:
        return
    of_kind = [device for device in leading.devices() if draft.view.cluster.kind_of(device) == filling.kind]
    with suppress(Overbooked):  # memory may not suffice for both
        draft.assign(job, Allocation.of(*of_kind[: filling.num_devices], fraction=round(filling.idle, 2), turn=1))


def _reason(dealt: DeviceCounts, num_jobs: int) -> str:
    words = [
        f"{len(dealt.held)} of {num_jobs} jobs hold their most profitable devices",
        f"{len(dealt.filled)} hold remaining devices",
        f"{len(dealt.fillings)} run in gaps",
    ]
    return ", ".join([f"{len(dealt.first)} that waited too long are served first", *words] if dealt.first else words)
