"""Policy handover: describe a policy's failure, and find jobs the next policy cannot keep running."""

from __future__ import annotations

import sys

from carpool.core.errors import place_of
from carpool.core.model import Job
from carpool.core.policy import Policy, Snapshot

POLICY_EXCEPTIONS = (Exception, SystemExit)  # that a policy may raise: a file of somebody's own may call exit()

_LONGEST = 300  # of an error's own words: they are shown beside other things


def describe_policy_failure(policy: Policy, error: BaseException) -> str:
    """What was raised, and where in the policy's file: ``policy Mine failed: KeyError: 'a' (mine.py, line 12)``."""
    kind = type(policy)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    spot = place_of(error, lambda other: other == file)
    words = " ".join(str(error).split())
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    return f"policy {kind.__name__} failed: {type(error).__name__}: {words}{spot}"


_EPSILON = 1e-9


def jobs_to_release(view: Snapshot) -> list[Job]:
    """Running jobs whose holdings the policy could not have given out: they have to leave before it is asked.

    One that gives out whole devices counts them as if each had one holder. One that shares lets fractions sum up to its
    own limit. The job submitted first stays; an exact one keeps its share for life, and may have it on a device alone.
    """
    leaving: list[Job] = []
    loads: dict[int, float] = {}
    for job in sorted(view.running(), key=lambda job: job.seq):
        assert job.desired is not None
        taken = [(device, share.fraction) for share in job.desired.shares for device in share.devices]
        if _is_given_by(view.policy, job) and _fits(view.policy, loads, taken):
            for device, fraction in taken:
                loads[device] = loads.get(device, 0.0) + fraction
        else:
            leaving.append(job)
    return leaving


def _is_given_by(policy: Policy, job: Job) -> bool:
    assert job.desired is not None
    fractions = job.desired.fractions
    return policy.may_share or fractions in {(1.0,), job.lane}


def _fits(policy: Policy, loads: dict[int, float], taken: list[tuple[int, float]]) -> bool:
    if not policy.may_share:
        return all(device not in loads for device, _ in taken)
    return all(loads.get(device, 0.0) + fraction <= policy.max_virtual + _EPSILON for device, fraction in taken)
