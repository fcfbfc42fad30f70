"""Policy handover: describe a policy's failure, and find jobs the next policy cannot keep running."""

from __future__ import annotations

import sys

from carpool.core.errors import place_of
from carpool.core.model import Job
from carpool.core.policy import Policy, Snapshot

POLICY_EXCEPTIONS = (Exception, SystemExit)  # that a policy may raise; a policy file may call exit()

_LONGEST = 300  # characters of an error's text


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
    """Running jobs to release because the policy could not have made their allocations.

    A policy that does not share expects one holder per device; one that shares has a limit on the sum of fractions. The
    job submitted first stays. An exact job's share never changes, so it may be the only holder of a partial share of a
    device. A job that cannot resume always stays.
    """
    leaving: list[Job] = []
    loads: dict[int, float] = {}
    for job in sorted(view.running(), key=lambda job: (job.spec.resumable, job.seq)):
        assert job.desired is not None
        taken = [(device, share.fraction) for share in job.desired.shares for device in share.devices]
        keeps = not job.spec.resumable
        if keeps or (_is_possible(view.policy, job) and _fits(view.policy, loads, taken)):
            for device, fraction in taken:
                loads[device] = loads.get(device, 0.0) + fraction
        else:
            leaving.append(job)
    return leaving


def _is_possible(policy: Policy, job: Job) -> bool:
    assert job.desired is not None
    fractions = job.desired.fractions
    return policy.may_share or fractions in {(1.0,), job.lane}


def _fits(policy: Policy, loads: dict[int, float], taken: list[tuple[int, float]]) -> bool:
    if not policy.may_share:
        return all(device not in loads for device, _ in taken)
    return all(loads.get(device, 0.0) + fraction <= policy.max_virtual + _EPSILON for device, fraction in taken)
