"""Plans without a market: no job has a choice, and all that wait fit on free devices."""

from __future__ import annotations

from math import ceil

from carpool.core.draft import Draft
from carpool.core.model import Job
from carpool.core.policy import Plan, Snapshot
from carpool.core.topology import Cluster

_SHORTLY = 0.05  # part of the patience up to which waiting earns nothing


def plan_uncontended(view: Snapshot, patience_s: float) -> Plan | None:
    """Start every waiting job; None if some job has a choice or does not fit, or has waited for long.

    A choice is another number or type of devices, another batch size, a neighbour to leave, or devices on fewer nodes.
    """
    occupancy = view.occupancy
    if len(view.cluster.kinds) != 1 or occupancy.is_shared or len(view.waiting) > occupancy.num_free:
        return None
    waiting = [view.jobs[name] for name in view.waiting]
    if any(
        view.at - job.since > _SHORTLY * patience_s for job in waiting
    ):  # the market stores the credit that it has earned by waiting
        return None
    if view.cluster.links and any(job.spec.devices > max(view.cluster.node_size.values()) for job in waiting):
        return None  # there may be a choice of links
    if not all(_is_rigid(job) for job in waiting) or sum(job.spec.devices for job in waiting) > occupancy.num_free:
        return None
    if not all(_keeps(view.cluster, job) for job in view.running()):
        return None
    if not waiting:
        return Plan.NOTHING
    draft = Draft(view)
    for job in sorted(waiting, key=lambda job: (-job.spec.devices, job.seq)):
        if not draft.place(job):
            return None
    runs = len(view.running_jobs) + len(waiting)
    return draft.finish(f"{runs} job{'s run' if runs > 1 else ' runs'}; devices are free for all that waited")


def _is_rigid(job: Job) -> bool:
    spec = job.spec
    return spec.narrowest == spec.widest and spec.batch_range is None


def _keeps(cluster: Cluster, job: Job) -> bool:
    """Whether a running job would keep exactly the devices it holds."""
    held = job.desired
    if held is None or not held.is_whole or not _is_rigid(job):
        return False
    if len(held.shares) == 1:
        return True
    return len(cluster.groups_of(held)) <= ceil(held.num_devices / cluster.node_size[cluster.kinds[0]])
