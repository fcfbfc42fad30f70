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

_SHARE = 0.2  # of the time may go into deciding
_AT_ONCE_S = 0.1  # of deciding, before anybody waits
_QUICK_S = 0.001  # of computing: what takes less counts for nothing


class PlanningStart(NamedTuple):
    """When something began, on the clock and in computing."""

    at_s: float
    computed_s: float


class PlanningBudget:
    """Deciding takes a fifth of the time at most.

    Time to decide comes in steadily and is kept up to a tenth of a second; a plan spends what it took on the clock,
    which is more than it computes where others keep the machine busy. Whoever has spent more than there was waits until
    it has come in again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, computed: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._computed = computed
        self._left_s = _AT_ONCE_S
        self._as_of = clock()

    def begin(self) -> PlanningStart:
        """Before a plan that may be made."""
        return PlanningStart(self._clock(), self._computed())

    def after(self, began: PlanningStart) -> float:
        """After it: seconds until the next one."""
        now = self._clock()
        if self._computed() - began.computed_s > _QUICK_S:
            kept_s = min(_AT_ONCE_S, self._left_s + _SHARE * (began.at_s - self._as_of))
            self._left_s = kept_s - (1.0 - _SHARE) * (now - began.at_s)  # it comes in meanwhile too
            self._as_of = now
        return max(0.0, -self._left_s) / _SHARE


_FALLBACK = "fifo"  # its plans are thrown away with the rest
_MOST_WAKES = 4  # one where jobs have to leave first, one for each rank of priority


def dry_run_policy(scheduler: Scheduler, estimates: Estimator, at: float, policy: str) -> None:
    """InputError where a policy is not to be had, or fails at what it would have to decide now; nothing is changed.

    The same decision is made later for real, of the same view: the same view gives the same plan.
    """
    other = Scheduler(
        scheduler.cluster, scheduler.policy, estimator=estimates, find_policy=parse_policy, fallback=_FALLBACK
    )
    other.restore(scheduler.state())
    with attribute_errors(policy):
        other.handle(at, (PolicyChanged(policy),))
        for _ in range(_MOST_WAKES):
            if other.policy_fault or other.wake_at is None:
                break
            if other.wake_at > at and other.timing.planned_at is not None:  # else it decides in rounds
                break
            other.handle(max(at, other.wake_at), (Woke(),))
    if other.policy_text != policy:
        raise InputError(
            other.policy_fault, where=f"policy {policy!r}", way_out="Test it with carpool.testing.PolicyContract."
        )
