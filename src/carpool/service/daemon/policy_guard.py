"""Policy guard: limits the time spent on planning and dry-runs a new policy before it takes over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.estimates import Estimator
from carpool.core.messages import PolicyChanged, Woke
from carpool.core.scheduler import Scheduler
from carpool.policies.registry import attribute_errors, parse_policy

_BURST_S = 0.1  # of planning before the next plan has to wait
_QUICK_S = 0.001  # of CPU time: a quicker plan is free


class PlanningStart(NamedTuple):
    """Wall-clock and CPU time at the start of a plan."""

    wall_s: float
    cpu_s: float


class PlanningBudget:
    """Limits planning to a share of the time, as a token bucket of wall-clock seconds."""

    def __init__(
        self,
        share: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._share = share
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._left_s = _BURST_S
        self._as_of = clock()

    def begin(self) -> PlanningStart:
        return PlanningStart(self._clock(), self._cpu_clock())

    def after(self, began: PlanningStart) -> float:
        """Account for a plan that has just ended. Returns the seconds that the next plan has to wait."""
        now = self._clock()
        if self._cpu_clock() - began.cpu_s > _QUICK_S:
            available_s = min(_BURST_S, self._left_s + self._share * (began.wall_s - self._as_of))
            self._left_s = available_s - (1.0 - self._share) * (now - began.wall_s)  # the bucket fills meanwhile
            self._as_of = now
        return max(0.0, -self._left_s) / self._share


_FALLBACK = "fifo"  # of the dry run, which discards its plans; the daemon's own is set in bootstrap.py
_MAX_WAKES = 4  # one if jobs have to be released first, and one for each priority rank


def dry_run_policy(scheduler: Scheduler, estimates: Estimator, at: float, policy: str) -> None:
    """Plan once with a new policy on a copy of the state; InputError where it is unknown or fails."""
    other = Scheduler(
        scheduler.cluster, scheduler.policy, estimator=estimates, find_policy=parse_policy, fallback=_FALLBACK
    )
    other.restore(scheduler.state())
    with attribute_errors(policy):
        other.handle(at, (PolicyChanged(policy),))
        for _ in range(_MAX_WAKES):
            if other.policy_fault or other.wake_at is None:
                break
            if other.wake_at > at and other.timing.planned_at is not None:  # otherwise it plans in rounds
                break
            other.handle(max(at, other.wake_at), (Woke(),))
    if other.policy_text != policy:
        raise InputError(
            other.policy_fault, where=f"policy {policy!r}", way_out="Test it with carpool.testing.PolicyContract."
        )
