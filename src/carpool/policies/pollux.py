"""Pollux: devices and batch sizes for all jobs together, by goodput and a mean of speed-ups that favours the slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.model import Allocation, Job, JobId, Kind
from carpool.core.placing import joined, lowest
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Node
from carpool.policies.goodput import goodputs
from carpool.policies.pollux_search import Floats, Row, Stake, search
from carpool.policies.registry import register
from carpool.policies.speeds import kind_held, kinds_of, rate_on

_NOTHING = 4e-3  # added to every speed-up: a job without devices counts as a 250th of its fair share
_LEAST_WORTH = 0.01  # of a start, however young the job


@register("pollux")
@dataclass(frozen=True, slots=True)
class Pollux(Policy):
    """Maximise the power mean of all jobs' speed-ups over a fair share: Pollux's objective, with a search of our own.

        speed-up_j(A) = goodput_j(A) / goodput_j(fair share),   goodput at the best batch size for A
        maximise (1/J Σ speed-up_j^power)^(1/power)

    The fair share is ⌈devices/jobs⌉ devices, taken as if they were on one node (as published, however many they are).
    A job that has to move is charged for it: its speed-up is multiplied by (T − R·restart_s)/(T + restart_s), T the
    age of the job and R how often it was moved before, and by no more than `trust`, since goodput after a move is
    believed and not measured. A job gets at most `growth` times as many devices as it ever had, beginning with as few
    as it accepts; two jobs that both span nodes do not meet on a node. Qiao et al., OSDI 2021.
    """

    power: float = -1.0
    restart_s: float = 30.0
    growth: int = 2
    trust: float = 0.9
    iterations: int = 80  # of the search over placements
    interval_s: float = 60.0  # decides anew after so many seconds, whatever happens
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.power >= 0.0:
            raise InputError(f"power is {self.power}", way_out="Give a number below 0, such as -1.")
        if self.growth < 2:
            raise InputError(f"growth is {self.growth}", way_out="Give 2 or more, or jobs never get more devices.")
        if not 0.0 < self.trust <= 1.0:
            raise InputError(f"trust is {self.trust}", way_out="Give a number above 0, up to 1.")

    def plan(self, view: Snapshot) -> Plan:
        """Search every kind of device by itself, then move whom it moved."""
        pasts = _pasts(view)
        draft, goals = Draft(view), list[_Goal]()
        for kind, jobs in _dealt(view).items():
            goals += self._goals(view, kind, jobs, pasts)
        _carry_out(draft, goals)
        moved = [goal for goal in goals if goal.row != goal.held]
        for goal in moved:
            pasts[goal.job.id] = pasts[goal.job.id].after(goal.row)
        num = sum([bool(goal.row) for goal in goals])
        reason = f"{num} of {len(goals)} jobs run, {len(moved)} of them moved, by goodput over a fair share"
        note = {job: list(past) for job, past in pasts.items() if past.placements}
        return draft.finish(reason, wake_at=view.at + self.interval_s if goals else None, note=note)

    def _goals(self, view: Snapshot, kind: Kind, jobs: Sequence[Job], pasts: dict[JobId, _Past]) -> list[_Goal]:
        """Where the jobs dealt to a kind should be."""
        sizes = _sizes(view, kind)
        options = [self._options(view, kind, job, pasts[job.id], sizes, len(jobs)) for job in jobs]
        stakes = [
            self._stake(view, kind, job, pasts[job.id], choice) for job, choice in zip(jobs, options, strict=True)
        ]
        rows = search(sizes, stakes, Random(f"{self.seed}/{kind}/{view.at}"), self.iterations)
        goals = []
        for job, stake, choice, row in zip(jobs, stakes, options, rows, strict=True):
            batches = choice.spread_batches if len(row) > 1 else choice.local_batches
            goals.append(_Goal(job, kind, stake.held, row, batches[_width(row)]))
        return goals

    def _options(
        self, view: Snapshot, kind: Kind, job: Job, past: _Past, sizes: Sequence[int], num_jobs: int
    ) -> _Options:
        """Speed-up and best batch for every number of devices the job may have now."""
        spec, capacity, node = job.spec, sum(sizes), max(sizes)
        most = max(self.growth * past.widest, spec.narrowest)
        top = min(most, capacity, spec.widest)
        fair = ceil(capacity / num_jobs)
        near = min(top, node)
        counts = [fair, *range(1, near + 1), *range(2, top + 1)]
        found = goodputs(view, spec, kind, counts, [False] * (1 + near) + [True] * (top - 1))
        basis = found[0][0] or max([rate for rate, _ in found]) or 1.0
        none = (0.0, 0)
        local = [none, *found[1 : near + 1], *[none] * (top - near)]
        spread = [none, none, *found[near + 1 :]][: top + 1]
        return _Options(
            np.array([rate / basis for rate, _ in local]),
            np.array([rate / basis for rate, _ in spread]),
            [batch for _, batch in local],
            [batch for _, batch in spread],
        )

    def _stake(self, view: Snapshot, kind: Kind, job: Job, past: _Past, options: _Options) -> Stake:
        """A job's costs: the terms of the power mean, to be minimised."""
        age = view.at - job.submitted_at
        moves = max(0, past.placements - 1)
        worth = max(age - moves * self.restart_s, 0.0) / (age + self.restart_s)
        worth = min(worth, self.trust) if job.desired is not None else max(worth, _LEAST_WORTH)
        held = _row(view, job)
        speedups = options.spread if len(held) > 1 else options.local
        kept = speedups[_width(held)] if _width(held) < len(speedups) else 0.0  # more than it may have by now
        local, spread = self._terms(options.local * worth), self._terms(options.spread * worth)
        local[1 : job.spec.narrowest] = spread[1 : job.spec.narrowest] = inf
        return Stake(local, spread, float(self._terms(np.array(kept))), held)

    def _terms(self, speedups: Floats) -> Floats:
        return np.asarray((speedups + _NOTHING) ** self.power)


class _Past(NamedTuple):
    """What is remembered of a job from plan to plan."""

    placements: int = 0  # how often it was given devices
    widest: int = 0  # most devices it ever had

    def after(self, row: Row) -> _Past:
        """After it was given that place."""
        return _Past(self.placements + 1, max(self.widest, _width(row))) if row else self


class _Options(NamedTuple):
    """By number of devices: speed-ups, and the batch sizes they are reached with."""

    local: Floats
    spread: Floats
    local_batches: Sequence[int]
    spread_batches: Sequence[int]


class _Goal(NamedTuple):
    """Where a job is and where it should be."""

    job: Job
    kind: Kind
    held: Row
    row: Row
    batch_size: int


def _pasts(view: Snapshot) -> dict[JobId, _Past]:
    """What the last plan noted, for the jobs there are now; of others, what they hold from an earlier policy."""
    known = cast(dict[str, Any], view.note or {})
    fresh = {name: (1, job.desired.num_devices) for name, job in view.jobs.items() if job.desired is not None}
    return {job: _Past(*known.get(job, fresh.get(job, ()))) for job in view.jobs}


def _sizes(view: Snapshot, kind: Kind) -> list[int]:
    """Devices of a kind on each node that is there."""
    occupancy = view.occupancy
    return [
        0
        if node.id in occupancy.lost
        else sum([len(bank.devices) for bank in node.banks if bank.kind == kind])
        - sum(occupancy.is_left(device) for device in occupancy.yielded if _is_of(view, device, node, kind))
        for node in view.cluster.nodes
    ]


def _is_of(view: Snapshot, device: int, node: Node, kind: Kind) -> bool:
    return device in node.devices and view.cluster.kind_of(device) == kind


def _dealt(view: Snapshot) -> dict[Kind, list[Job]]:
    """Jobs by the kind they are to run on: the one they hold, else where speed and devices for each job are most."""
    capacity = {kind: sum(_sizes(view, kind)) for kind in view.cluster.kinds}
    dealt: dict[Kind, list[Job]] = {kind: [] for kind in view.cluster.kinds}
    for job in view.running():
        dealt[cast(Kind, kind_held(view, job))].append(job)
    for job in sorted([view.jobs[name] for name in view.waiting], key=lambda job: job.seq):
        fewest = job.spec.narrowest
        kinds = [kind for kind in kinds_of(view, job.spec, fewest) if capacity[kind] >= fewest]
        if len(kinds) > 1:
            worth = {
                kind: rate_on(view, job.spec, kind, fewest) * capacity[kind] / (len(dealt[kind]) + 1) for kind in kinds
            }
            kinds.sort(key=lambda kind: -worth[kind])
        if kinds:
            dealt[kinds[0]].append(job)
    return {kind: sorted(jobs, key=lambda job: job.seq) for kind, jobs in dealt.items() if jobs}


def _row(view: Snapshot, job: Job) -> Row:
    """Where a job sits."""
    counts: dict[int, int] = {}
    for device in job.desired.devices() if job.desired is not None else ():
        node = view.cluster.node_of(device).id
        counts[node] = counts.get(node, 0) + 1
    return tuple(sorted(counts.items()))


def _width(row: Row) -> int:
    return sum([count for _, count in row])


def _carry_out(draft: Draft, goals: Sequence[_Goal]) -> None:
    """Move jobs, all leaving before any enters, and set the batch of those that stay."""
    for goal in goals:
        if goal.held and goal.row != goal.held:
            draft.release(goal.job)
    nodes = draft.view.cluster.nodes
    for goal in goals:
        if goal.row != goal.held and goal.row:
            runs = [run for node, count in goal.row for run in lowest(draft.occupancy, nodes[node], goal.kind, count)]
            draft.assign(goal.job, Allocation.exclusive(joined(runs), goal.batch_size))
        elif goal.row and goal.job.desired is not None:
            draft.assign(goal.job, goal.job.desired._replace(batch_size=goal.batch_size))
