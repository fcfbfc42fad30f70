"""Least attained service in discrete queues (Tiresias-L), preemptive."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from heapq import merge
from math import inf
from typing import Any, ClassVar, cast

from carpool.core.draft import Draft
from carpool.core.errors import InputError
from carpool.core.estimates import Estimator
from carpool.core.model import Job, JobId
from carpool.core.placement import placement_rule
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.queue import Demand, Entry, demand_of
from carpool.policies.baselines.preemption import PreemptionResult, among, preempt
from carpool.policies.registry import register

_ROUNDING = 1.0 + 1e-9  # service is a sum of products; a job preempted on a threshold has crossed it
_ANY = 1 << 62  # after any submission
_LATER_S = 1e-6  # wake_at must be in the future


@register("las")
@dataclass(frozen=True, slots=True)
class Las(Policy):
    """Jobs of the lowest queue hold the devices, in order of submission within a queue.

    A job is in queue q when its attained device-seconds have reached q of the `thresholds`. A job that has waited
    `promote` times as long as it has run restarts in the first queue (0: never). The head of the queue does not
    block. Gu et al., "Tiresias", NSDI 2019 (discretized two-dimensional LAS).
    """

    keeps_running_order: ClassVar[bool] = True  # for the crossings in its keys
    thresholds: tuple[float, ...] = (3250.0, 7200.0, 18000.0)
    promote: float = 8.0
    placement: str = "consolidated"

    def __post_init__(self) -> None:
        if list(self.thresholds) != sorted(set(self.thresholds)) or min(self.thresholds, default=1.0) <= 0.0:
            raise InputError(f"thresholds {self.thresholds} do not ascend from above 0", way_out="Such as 3250/7200.")
        placement_rule(self.placement)

    def queue_of(self, service: float) -> int:
        return bisect_right(self.thresholds, service * _ROUNDING)

    def crossings(self, job: Job, base: float) -> tuple[float, ...]:
        """When a running job's service since `base` reaches each threshold; the last queue has none."""
        assert job.desired is not None
        width = job.desired.num_devices
        start = job.as_of - (_attained(job) - base) / width
        return (*[start + threshold / width for threshold in self.thresholds], inf)

    def waiting_key(self, job: Job, estimates: Estimator) -> int:
        return self.queue_of(_attained(job))

    def running_key(self, job: Job, estimates: Estimator) -> tuple[float, ...]:
        return self.crossings(job, 0.0)

    def plan(self, view: Snapshot) -> Plan:
        head = view.waiting.head
        if head is None:
            return Plan.NOTHING
        seen = _Seen.before(view)
        if (
            view.occupancy.num_free < view.waiting.narrowest
            and view.at < seen.wake_at
            and head[:2] > seen.last
            and not any(job in view.waiting for job in seen.fresh)
        ):
            return Plan(wake_at=seen.wake_at if seen.wake_at < inf else None)
        fresh, due = self._promoted(view, seen)
        ranking = _Ranking(self, view, fresh, seen)
        stuck = seen.still_stuck(view)
        draft = Draft(view)
        outcome = preempt(draft, _Offers(self, draft, fresh, stuck), ranking, rule=placement_rule(self.placement))
        seen = self._after(view, outcome, ranking, _Seen(due=due, num_free=draft.num_free, fresh=fresh, stuck=stuck))
        waits = len(view.waiting) + len(outcome.released) > len(outcome.started)
        wake_at = max(seen.wake_at, view.at + _LATER_S) if waits and seen.wake_at < inf else None
        reason = f"least attained service: {outcome.words()}" if outcome else ""
        return draft.finish(reason, wake_at=wake_at, note=seen.note())

    def _promoted(self, view: Snapshot, seen: _Seen) -> tuple[dict[JobId, float], float]:
        """Service of promoted jobs at their promotion, and when the next promotion may be due."""
        if not self.promote or not self.thresholds:
            return {}, inf
        fresh = {job: base for job, base in seen.fresh.items() if job in view.jobs}
        if view.at < seen.due:
            return fresh, seen.due
        due = view.at + self.promote * self.thresholds[0]  # by then at the latest: jobs also crash into the queue
        for name in view.waiting:
            job = view.jobs[name]
            if self.queue_of(_attained(job) - fresh.get(name, 0.0)):
                promotion = job.since + self.promote * _attained(job) / job.spec.devices
                if promotion <= view.at:
                    fresh[name] = _attained(job)
                else:
                    due = min(due, promotion)
        return fresh, due

    def _after(self, view: Snapshot, outcome: PreemptionResult, ranking: _Ranking, seen: _Seen) -> _Seen:
        stuck: dict[Demand, tuple[int, int, int]] = {}
        if all(view.jobs[job].spec.devices == 1 for job in outcome.released):  # a displaced gang may leave room
            stuck = {
                **seen.stuck,
                **{demand: (*entry[:2], short) for demand, (entry, short) in outcome.refused.items()},
            }
        waiting = [*outcome.released.values(), *seen.stuck.values(), *([outcome.left] if outcome.left else [])]
        floor = min([entry[0] for entry in waiting], default=len(self.thresholds) + 1)
        floor, last, until = ranking.outlook(floor, outcome.released)
        due = seen.due
        for job, (queue, seq, _) in outcome.started.items():
            if max(queue, floor - 1) < len(self.thresholds):
                left = (
                    self.thresholds[max(queue, floor - 1)] - view.attained_s(view.jobs[job]) + seen.fresh.get(job, 0.0)
                )
                until = min(until, view.at + left / view.jobs[job].spec.devices)
            last = max(last, (queue, seq))
        for job in outcome.released if self.promote else ():
            due = min(due, view.at + self.promote * view.attained_s(view.jobs[job]) / view.jobs[job].spec.devices)
        return replace(seen, floor=floor, last=last, until=until, due=due, stuck=stuck)


class _Offers:
    """Waiting jobs in order, with promoted ones moved, without those known not to fit."""

    __slots__ = ("_draft", "_early", "_fresh", "_stuck", "_view")

    def __init__(
        self, las: Las, draft: Draft, fresh: dict[JobId, float], stuck: dict[Demand, tuple[int, int, int]]
    ) -> None:
        self._draft = draft
        self._view = view = draft.view
        self._fresh = fresh
        self._stuck = stuck
        self._early: list[Entry] = [
            (las.queue_of(_attained(view.jobs[job]) - base), view.jobs[job].seq, job)
            for job, base in fresh.items()
            if job in view.waiting
        ]

    def __call__(self, refused: set[Demand]) -> Iterator[Entry]:
        """Entries in order; on a second call, after gangs were displaced, including jobs that did not fit."""
        entries = self._view.waiting.entries(refused)
        if self._early:
            later = (entry for entry in entries if entry[2] not in self._fresh)
            entries = merge(among(sorted(self._early), self._view.jobs)(refused), later)
        stuck, self._stuck = self._stuck, {}
        return self._moving(entries, stuck, refused) if stuck else entries

    def _moving(
        self, entries: Iterator[Entry], stuck: dict[Demand, tuple[int, int, int]], refused: set[Demand]
    ) -> Iterator[Entry]:
        free = self._draft.num_free
        for entry in entries:
            demand = demand_of(self._view.jobs[entry[2]])
            queue, seq, short = stuck.get(demand, (inf, 0, 0))
            if entry[:2] >= (queue, seq) and self._draft.num_free - free < short:  # displaced gangs may leave room
                refused.add(demand)
            else:
                yield entry


class _Ranking:
    """Running jobs by queue and submission, and the time of the next queue change; computed on demand."""

    __slots__ = ("_behind", "_entries", "_fresh", "_las", "_last", "_running", "_seen", "_view")

    def __init__(self, las: Las, view: Snapshot, fresh: dict[JobId, float], seen: _Seen) -> None:
        self._las = las
        self._view = view
        self._fresh = fresh
        self._seen = seen if view.at < seen.until else _Seen()
        self._behind: tuple[int, int] | None = None  # the waiting job that asked
        self._running: list[Entry] = []
        self._entries: list[Entry] = []

    def __call__(self, behind: Entry) -> list[Entry]:
        if behind[:2] > self._seen.last:
            return []
        self._behind = behind[0], behind[1]
        running = list(self._view.running_jobs.entries())
        at, (first, least, _) = self._view.at, behind
        if first:  # comparing times is several times cheaper than finding every job's queue
            after = [e for e in running if e[0][first] <= at or (e[1] > least and e[0][first - 1] <= at)]
        else:
            after = [e for e in running if e[0][0] <= at or e[1] > least]
        self._running = running
        ranked = [(bisect_right(times, at), seq, job) for times, seq, job in self._with_fresh(after)]
        self._entries = sorted([entry for entry in ranked if entry[:2] > self._behind])
        return self._entries

    def _with_fresh(self, entries: list[Entry]) -> list[Entry]:
        """Crossings corrected for promoted jobs."""
        if not self._fresh:
            return entries
        fresh = [self._view.jobs[job] for job in self._fresh]
        own = [(self._las.crossings(job, self._fresh[job.id]), job.seq, job.id) for job in fresh if job.desired]
        return [entry for entry in entries if entry[2] not in self._fresh] + own

    def outlook(self, floor: int, released: Container[JobId]) -> tuple[int, tuple[int, int], float]:
        """The first queue that matters to waiting jobs, the last position that runs, and until when both are valid."""
        seen = self._seen
        if self._behind is None:
            return seen.floor, seen.last, seen.until
        stayed = next((entry for entry in reversed(self._entries) if entry[2] not in released), None)
        last = self._behind if stayed is None else (stayed[0], stayed[1])
        if floor >= seen.floor:
            return seen.floor, max(last, (seen.floor - 1, _ANY)), seen.until
        at, least = self._view.at, max(0, floor - 1)  # falling back to a queue before `floor` changes no rank
        until = min(
            [times[max(bisect_right(times, at), least)] for times, _, _ in self._with_fresh(self._running)], default=inf
        )
        return floor, max(last, (floor - 1, _ANY)), until


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of the previous plan, to skip scanning all jobs when nothing can have changed."""

    floor: int = 1_000  # no waiting job is in a queue before this one
    last: tuple[int, int] = (1_000, 0)  # (queue, submission): no running job comes after it
    until: float = 0.0  # no running job falls back to `floor` or further before
    due: float = 0.0  # no waiting job is promoted before
    num_free: int = -1  # free devices after the plan
    fresh: dict[JobId, float] = field(default_factory=dict)  # device-seconds a promoted job had at its promotion
    # Per demand: queue, number of the submission, and devices lacking.
    stuck: dict[Demand, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def wake_at(self) -> float:
        """When something changes without a fact."""
        return min(self.until, self.due)

    @classmethod
    def before(cls, view: Snapshot) -> _Seen:
        if view.note is None:
            return cls()
        floor, last, until, due, num_free, fresh, stuck = cast(Any, view.note)
        known = {
            (width, tuple(kinds), nodes[0] if nodes else 0): (queue, seq, short)
            for width, kinds, queue, seq, short, *nodes in stuck
        }
        return cls(
            floor, tuple(last), inf if until is None else until, inf if due is None else due, num_free, fresh, known
        )

    def still_stuck(self, view: Snapshot) -> dict[Demand, tuple[int, int, int]]:
        """Demands that still cannot fit: too few devices came free, and no running job fell back."""
        freed = view.occupancy.num_free - self.num_free
        if view.at >= self.until or freed < 0:
            return {}
        return {demand: (q, seq, short - freed) for demand, (q, seq, short) in self.stuck.items() if short > freed}

    def note(self) -> object:
        """As JSON, which has no infinity."""
        until, due = (None if time == inf else time for time in (self.until, self.due))
        stuck = [
            [width, list(kinds), *entry, *([nodes] if nodes else [])]
            for (width, kinds, nodes), entry in self.stuck.items()
        ]
        return [self.floor, list(self.last), until, due, self.num_free, self.fresh, stuck]


def _attained(job: Job) -> float:
    """Device-seconds up to the job's last record."""
    return sum([seconds for _, seconds in job.service])
