"""Priorities and deadlines: rank jobs above the policy's own order.

A job's *rank* is its priority, plus one while its deadline is urgent. The policy is shown one rank at a time, from the
top, and sees the next only when it starts no more jobs of the ranks above. So a waiting job of higher rank starts
first, and devices it cannot use go to others. Among jobs of one rank the policy decides alone. Rank also multiplies the
weight (`weight_with_priority`), so policies that use weights preempt running jobs for it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from carpool.core.messages import DeadlineMissed, Fact
from carpool.core.model import Job, JobId
from carpool.core.policy import Plan, Snapshot
from carpool.core.queue import Queue
from carpool.core.topology import Placement

PRIORITIES = {"low": -1, "normal": 0, "high": 1, "urgent": 2}

_FACTOR = 8.0  # on the weight, per rank
_MARGIN = 2.0  # a deadline is urgent when less than this many times the expected time is left
_UNKNOWN = 0.25  # part of the deadline expected for a job of unknown length


def weight_with_priority(weight: float, priority: int) -> float:
    """The weight of a job of that priority: eight times that of the priority below."""
    return weight * _FACTOR**priority


def priority_name(priority: int) -> str:
    """The name of a priority, such as ``high``."""
    return next(word for word, value in PRIORITIES.items() if value == priority)


class PriorityPlanner:
    """Asks a policy to plan one rank after the other; `names` are the jobs with a priority or a deadline."""

    def __init__(self, names: set[JobId]) -> None:
        self._names = names
        self._served: int | None = None  # rank planned last; None once all ranks are planned
        self.next_at: float | None = None  # when a deadline becomes urgent or passes next

    @property
    def is_partial(self) -> bool:
        """Whether the last plan covered higher ranks only; lower ones follow at the same instant."""
        return self._served is not None

    @property
    def is_waiting(self) -> bool:
        """Whether to plan again even if nothing happens."""
        return self.is_partial or self.next_at is not None

    def is_due(self, at: float) -> bool:
        """Whether a deadline has become urgent or passed since the last plan."""
        return self.next_at is not None and at >= self.next_at

    def plan(self, view: Snapshot, attempt: Callable[[], Plan], *, goes_on: bool) -> Plan:
        """Plan rank by rank from the top: the first plan that starts a job, else one plan for all ranks.

        With `goes_on`, only ranks below the last one that was planned are considered.
        """
        below = self._served if goes_on and self._served is not None else inf
        self._served = self.next_at = None
        self._names.difference_update([name for name in self._names if name not in view.jobs])
        if not self._names:
            return attempt()
        ranks = {name: view.jobs[name].spec.priority + is_urgent(view, view.jobs[name]) for name in self._names}
        self.next_at = _next_at(view, [view.jobs[name] for name in self._names])
        waiting = {ranks[name] for name in self._names if name in view.waiting}
        if sum(name in view.waiting for name in self._names) < len(view.waiting):
            waiting.add(0)
        levels = sorted([rank for rank in waiting if rank < below], reverse=True)
        with _weights(view, ranks):
            for level in levels[:-1]:
                with _only(view, level, ranks):
                    plan = attempt()
                if plan.changes and (plan.drafted is None or _starts(plan, view.jobs)):
                    self._served = level
                    return plan
            return attempt()

    def missed(self, jobs: Mapping[JobId, Job], before: float, at: float, facts: Sequence[Fact]) -> list[Fact]:
        """Facts for the deadlines that passed since `before`, unless given already."""
        passed = [jobs[name] for name in sorted(self._names) if name in jobs and before < jobs[name].deadline_at <= at]
        return [fact for job in passed if (fact := DeadlineMissed(job.id)) not in facts]


def _starts(plan: Plan, jobs: Mapping[JobId, Job]) -> bool:
    return any(change.allocation is not None and jobs[change.job].desired is None for change in plan.changes)


def is_urgent(view: Snapshot, job: Job) -> bool:
    """Whether a job must run now to meet its deadline; False once missed."""
    return 0.0 < job.deadline_at - view.at < _needed_s(view, job)


def describe_urgency(view: Snapshot, job: Job) -> str:
    """A job's priority and deadline in words; empty if it has neither."""
    words = [f"has priority {priority_name(job.spec.priority)}"] if job.spec.priority else []
    left = job.deadline_at - view.at
    if left <= 0.0:
        words.append(f"missed its deadline {-left:.0f} s ago")
    elif left < inf:
        urgent = " (urgent: scheduled one priority higher)" if is_urgent(view, job) else ""
        words.append(f"has {left:.0f} s to its deadline{urgent}")
    return " and ".join(words)


def expected_s(view: Snapshot, job: Job) -> float | None:
    """Seconds until a job ends where it runs, or on the devices it requests; None: unknown."""
    left = view.estimates.remaining(job, view.at).mean
    rate = job.rate
    if job.desired is None or rate <= 0.0:
        shapes = [Placement(((kind, job.spec.devices),)) for kind in view.kinds_for(job)]
        rate = max([view.estimates.rate(job.spec, shape).mean for shape in shapes], default=0.0)
    return left / rate if left < inf and rate > 0.0 else None


def _needed_s(view: Snapshot, job: Job) -> float:
    if not job.spec.deadline_s:
        return 0.0
    expected = expected_s(view, job)
    return _UNKNOWN * job.spec.deadline_s if expected is None else _MARGIN * expected


def _next_at(view: Snapshot, jobs: Sequence[Job]) -> float | None:
    times = [at for job in jobs for at in (job.deadline_at - _needed_s(view, job), job.deadline_at)]
    return min([at for at in times if view.at < at < inf], default=None)


@contextmanager
def _weights(view: Snapshot, ranks: Mapping[JobId, int]) -> Iterator[None]:
    """Show jobs with urgent deadlines at the weight of their rank."""
    jobs = view.jobs
    shown = {
        name: job._replace(
            spec=replace(job.spec, weight=weight_with_priority(job.spec.weight, rank - job.spec.priority))
        )
        for name, rank in ranks.items()
        if rank > (job := jobs[name]).spec.priority
    }
    if shown:
        view.jobs = ChainMap(shown, dict(jobs))
    try:
        yield
    finally:
        view.jobs = jobs


@contextmanager
def _only(view: Snapshot, level: int, ranks: Mapping[JobId, int]) -> Iterator[None]:
    """Show the queue without lower ranks."""
    whole, shown = view.waiting, Queue()
    for name in whole if level <= 0 else [name for name in ranks if name in whole]:
        if ranks.get(name, 0) >= level:
            job = view.jobs[name]
            shown.put(job, view.policy.waiting_key(job, view.estimates))
    view.waiting = shown
    try:
        yield
    finally:
        view.waiting = whole
