"""Gavel: time shares on heterogeneous devices by max-min, fairness, makespan or throughput objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import numpy as np

from carpool.core.draft import Draft
from carpool.core.errors import InputError, UnknownName
from carpool.core.model import Job, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.policies.gavel import lp as gavel_lp
from carpool.policies.gavel.lp import Floats, Problem
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

OBJECTIVES = ("max-min", "ftf", "makespan", "throughput")
_UNKNOWN_S = 86_400.0  # a job of unknown length counts as this long on the average device

Rates = Sequence[tuple[Job, Mapping[Kind, float]]]


@register("gavel")
@dataclass(frozen=True, slots=True)
class Gavel(Policy):
    """Optimize time shares of device types, then approximate them in rounds (Narayanan et al., OSDI 2020).

    The programs are in `lp`, the rounds in `rounds`. `perf=False` is the heterogeneity-agnostic form: each job's
    rate is taken to be the same on every type it can use, and types are filled in random order. `max-min` in that
    form is what the paper calls LAS.
    """

    objective: str = "max-min"  # or ftf (finish-time fairness), makespan, throughput
    perf: bool = True  # whether rates by kind are used
    recompute_s: float = 0.0  # least time between two solutions; jobs that arrive in between wait (Gavel: 1920)
    turn_s: float = 360.0  # after this time at most the next turn begins; half of it is credited at the start
    seed: int = 0  # of the random order of kinds when perf=False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UnknownName("objective", self.objective, OBJECTIVES)
        if not self.turn_s > 0.0:
            raise InputError(f"turn_s is {self.turn_s}", way_out="Give a number of seconds above 0.")

    def plan(self, view: Snapshot) -> Plan:
        capacity = capacity_of(view)
        active = sorted(view.active(), key=lambda job: job.seq)
        rates = [(job, speeds) for job in active if any((speeds := rates_of(view, job, capacity)).values())]
        if not rates:
            return Plan.NOTHING
        table = old = Timetable.of_note(view.note)
        if table is None or is_stale(view, table, [job for job, _ in rates], self.recompute_s):
            table = self._solve(view, rates, capacity, old)
        chosen = schedule_round(view, table, rates, self._order(view, rates, capacity), self.turn_s / 2.0)
        draft = Draft(view)
        running = apply_round(draft, [job for job, _ in rates], chosen)
        reason = f"round of {running} of {len(rates)} jobs by {self.objective} time shares of {table.at:.0f} s"
        note = None if table is old else table.as_note()
        return draft.finish(reason, wake_at=next_round(view.at, self.turn_s, table.at + self.recompute_s), note=note)

    def _solve(self, view: Snapshot, rates: Rates, capacity: dict[Kind, int], old: Timetable | None) -> Timetable:
        problem = self._problem(view, rates, capacity)
        memory: dict[str, Any] = {}
        if self.objective == "ftf":
            alone_s, memory = _alone_s(problem, rates, old)
            parts = gavel_lp.finish_time_fairness(problem, alone_s)
        elif self.objective == "makespan":
            parts = gavel_lp.makespan(problem)
        elif self.objective == "throughput":
            parts = gavel_lp.throughput(problem)
        else:
            parts = gavel_lp.max_min(problem)
        due = {
            job.id: dict(zip(capacity, row, strict=True)) for (job, _), row in zip(rates, parts.tolist(), strict=True)
        }
        return Timetable(view.at, capacity, due, {job.id: received_s(view, job) for job, _ in rates}, memory)

    def _problem(self, view: Snapshot, rates: Rates, capacity: Mapping[Kind, int]) -> Problem:
        table = np.array([[speeds[kind] for kind in capacity] for _, speeds in rates])
        devices = np.array([float(count) for count in capacity.values()])
        usable = table > 0.0
        average = (table @ devices) / (usable @ devices)
        left = np.array([view.estimates.remaining(job, view.at).mean for job, _ in rates])
        return Problem(
            rates=table if self.perf else usable * average[:, None],
            widths=np.array([float(job.spec.devices) for job, _ in rates]),
            weights=np.array([job.spec.weight for job, _ in rates]),
            left=np.where(left < inf, left, _UNKNOWN_S * average),
            age_s=np.array([view.at - job.submitted_at for job, _ in rates]),
            capacity=devices,
        )

    def _order(self, view: Snapshot, rates: Rates, capacity: Mapping[Kind, int]) -> list[Kind]:
        """Types in filling order: fastest first; random if rates are ignored."""
        kinds = list(capacity)
        if not self.perf:
            Random(f"{self.seed}/{view.at}").shuffle(kinds)
            return kinds
        best = [(speeds, max(speeds.values())) for _, speeds in rates]
        return sorted(kinds, key=lambda kind: -sum([speeds[kind] / top for speeds, top in best]))


def _alone_s(problem: Problem, rates: Rates, old: Timetable | None) -> tuple[Floats, dict[str, Any]]:
    """Each job's total time on its own part of the cluster, and the state for the next call.

    Work done so far is counted at the rate the job's part had then: parts grow as others leave.
    """
    isolated = problem.isolated
    spent: list[float] = []
    for (job, _), left in zip(rates, problem.left.tolist(), strict=True):
        before = old.memory.get(job.id) if old is not None else None
        spent.append(0.0 if before is None else before[0] + max(0.0, before[2] - left) / before[1])
    values = zip(spent, isolated.tolist(), problem.left.tolist(), strict=True)
    memory: dict[str, Any] = {job.id: row for (job, _), row in zip(rates, map(list, values), strict=True)}
    return np.array(spent) + problem.left / isolated, memory
