"""Jobs that cannot resume: no plan takes their devices away, under any policy.

A job with `resumable` False has to start over when it loses its devices. If a plan would release or move such a job,
the policy plans again with the job, all jobs on its devices, and these devices hidden: it plans for a smaller cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from carpool.core.model import Job, JobId
from carpool.core.policy import Plan, Snapshot
from carpool.core.queue import RunningJobs


def is_pinned(job: Job) -> bool:
    """Whether a job runs and would lose its work if it lost its devices."""
    return job.desired is not None and not job.spec.resumable


def plan_without_preempting(view: Snapshot, attempt: Callable[[], Plan]) -> Plan:
    """The first plan that leaves every pinned job on its devices; the share of a device may change."""
    hidden: set[JobId] = set()
    plan = attempt()
    while victims := _victims(view, plan):
        if victims <= hidden:  # the policy insists on jobs that it does not see as running
            return replace(plan, changes=(), drafted=None, reason=f"jobs that cannot resume stay: {plan.reason}")
        hidden |= victims
        with _hidden(view, hidden):
            plan = attempt()
    return plan


def _victims(view: Snapshot, plan: Plan) -> set[JobId]:
    """Pinned jobs that a plan would release or move to other devices."""
    found: set[JobId] = set()
    for name, allocation, _ in plan.changes:
        job = view.jobs.get(name)  # None: refused when the plan is applied
        if job is None or job.spec.resumable or job.desired is None:
            continue
        if allocation is None or not allocation.same_devices(job.desired):
            found.add(name)
    return found


@contextmanager
def _hidden(view: Snapshot, hidden: set[JobId]) -> Iterator[None]:
    """Show neither the hidden jobs, nor the jobs beside them, nor their devices; `hidden` gets the jobs beside them."""
    occupancy, running = view.occupancy, view.running_jobs
    devices = _devices_of(view, hidden)
    shown = RunningJobs(ordered=running.is_ordered)
    for key, _, name in running.entries():
        if name not in hidden:
            shown.put(view.jobs[name], key)
    view.running_jobs, occupancy.pinned_devices = shown, devices
    try:
        yield
    finally:
        view.running_jobs, occupancy.pinned_devices = running, frozenset()


def _devices_of(view: Snapshot, hidden: set[JobId]) -> frozenset[int]:
    """All devices of the hidden jobs; jobs beside them become hidden too, with their devices."""
    devices: set[int] = set()
    pending = list(hidden)
    while pending:
        held = view.jobs[pending.pop()].desired
        for device in held.devices() if held is not None else ():
            devices.add(device)
            beside = {resident.job for resident in view.occupancy.residents(device)} - hidden
            hidden |= beside
            pending += beside
    return frozenset(devices)
