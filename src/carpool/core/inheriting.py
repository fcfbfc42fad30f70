"""What a policy cannot go on with when it takes over from another one."""

from __future__ import annotations

from carpool.core.model import Job
from carpool.core.policy import Policy, Snapshot

_EPSILON = 1e-9


def ousted(view: Snapshot) -> list[Job]:
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
