"""A policy decides once on paper before it decides for a daemon."""

from __future__ import annotations

from carpool.core.errors import InputError
from carpool.core.estimates import Estimator
from carpool.core.messages import PolicyChanged, Woke
from carpool.core.scheduler import Scheduler
from carpool.policies.blame import blaming
from carpool.policies.registry import parse_policy

_FALLBACK = "fifo"  # its plans are thrown away with the rest
_MOST_WAKES = 4  # one where jobs have to leave first, one for each rank of priority


def audition(scheduler: Scheduler, estimates: Estimator, at: float, policy: str) -> None:
    """InputError where a policy is not to be had, or fails at what it would have to decide now; nothing is changed.

    The same decision is made later for real, of the same view: the same view gives the same plan.
    """
    other = Scheduler(
        scheduler.cluster, scheduler.policy, estimator=estimates, find_policy=parse_policy, fallback=_FALLBACK
    )
    other.reopen(scheduler.balance())
    with blaming(policy):
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
