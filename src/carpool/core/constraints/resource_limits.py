"""Host resource limits: keep a policy's plan within the cores, RAM and disk of each node."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace

from carpool.core.draft import Draft
from carpool.core.errors import OutOfHostResources
from carpool.core.host_resources import resource_shortage
from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId, Job, JobId, JobSpec
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Plan, Snapshot

_TOLD = 3  # nodes that are named


def plan_within_resources(view: Snapshot, attempt: Callable[[], Plan]) -> Plan:
    """The plan of the first attempt that lets no job have supplies that its node lacks.

    A policy chooses devices. Where a node lacks the cores, RAM or disk for what it chose, it is asked again with less
    to choose from: the job in question is shown with fewer devices, or not in the queue at all; one that runs is shown
    as if it could not be resized. Others in the queue that no node has supplies for then are left out with it: it takes
    as many attempts as there are unlike demands, not jobs. Where a policy insists, its plan ends before that job.
    """
    try:
        return attempt()
    except OutOfHostResources as error:
        short = error
    shown: dict[JobId, Job] = {}
    hidden: set[JobId] = set()
    jobs, view.jobs = view.jobs, ChainMap(shown, dict(view.jobs))
    keys = {entry[2]: entry[0] for entry in view.waiting.entries()}
    try:
        while True:
            job, draft = view.jobs[JobId(short.job)], short.draft if isinstance(short.draft, Draft) else None
            if job.id in hidden or (job.desired is not None and job.id in shown):
                return _as_far_as_it_goes(draft, short)
            narrower = _narrowed(view, job)
            if narrower is not None:
                shown[job.id] = narrower
                if job.desired is None:
                    view.waiting.put(narrower, keys[job.id])
            else:
                for other in _in_vain(view, job, draft):
                    hidden.add(other.id)
                    view.waiting.discard(other.id)
            try:
                return attempt()
            except OutOfHostResources as error:
                short = error
    finally:
        view.jobs = jobs
        for name in {*shown, *hidden} & keys.keys():
            view.waiting.put(jobs[name], keys[name])


def _narrowed(view: Snapshot, job: Job) -> Job | None:
    """A job with fewer devices at most than before; None for one that takes no fewer.

    One that runs may have what it has. One that waits may have as many as there are supplies for on all nodes, then as
    on one, then as few as it takes.
    """
    spec = job.spec
    if job.desired is not None:
        width = job.desired.num_devices
        return job._replace(spec=replace(spec, devices=width, min_devices=width, max_devices=width))
    rooms = supported_devices(view.occupancy, spec)
    widths = [width for width in (sum(rooms), max(rooms, default=0), spec.narrowest) if width < spec.widest]
    most = max([width for width in widths if width >= spec.narrowest], default=0)
    if not most:
        return None
    least = spec.narrowest
    return job._replace(spec=replace(spec, devices=min(spec.devices, most), min_devices=least, max_devices=most))


def _in_vain(view: Snapshot, job: Job, draft: Draft | None) -> list[Job]:
    """A waiting job, and those that no node has supplies for either once the draft's jobs have theirs."""
    found = [job]
    fits: dict[object, bool] = {}  # by demand
    if draft is None:
        return found
    for name in view.waiting:
        spec = view.jobs[name].spec
        if name == job.id or name in draft.changes or not spec.asks_supplies:
            continue
        demand = spec.kinds, spec.narrowest, spec.supplies_for(1)
        if demand not in fits:
            fits[demand] = sum(supported_devices(draft.occupancy, spec)) >= spec.narrowest
        if not fits[demand]:
            found.append(view.jobs[name])
    return found


def supported_devices(occupancy: Occupancy, spec: JobSpec) -> list[int]:
    """For how many of its devices each node has supplies for a job, whoever holds the devices."""
    rooms = []
    for node in occupancy.cluster.nodes:
        size = sum(len(bank.devices) for bank in node.banks if not spec.kinds or bank.kind in spec.kinds)
        if size and node.id not in occupancy.lost:
            most = occupancy.most_for(spec, node)
            rooms.append(size if most is None else min(most, size))
    return rooms


def describe_shortage(view: Snapshot, job: Job) -> str:
    """Which supplies a waiting job waits for, in words; empty where there are enough for it."""
    spec, occupancy = job.spec, view.occupancy
    if (
        job.id not in view.waiting
        or not spec.asks_supplies
        or sum(supported_devices(occupancy, spec)) >= spec.narrowest
    ):
        return ""
    needed = spec.supplies_for(spec.narrowest)
    nodes = [node for node in view.cluster.nodes if node.id not in occupancy.lost]
    told = [(node, resource_shortage(node.supplies, occupancy.hosting.taken(node.id), needed)) for node in nodes]
    words = [f"node {node.name} has {short}" for node, short in told if short]
    more = f", and {len(words) - _TOLD} more are short" if len(words) > _TOLD else ""
    return "; ".join(words[:_TOLD]) + more


def describe_foreign_use(view: Snapshot, job: Job, outsiders: Mapping[DeviceId, OutsidersSeen]) -> str:
    """Which devices a waiting job does not get because others compute on them, in words; empty where there are none."""
    kinds, cluster = job.spec.kinds, view.cluster
    words = [
        f"device {cluster.device_name(device)} is left to {' and '.join(map(describe_process, seen.processes[:_TOLD]))}"
        for device, seen in sorted(outsiders.items())
        if job.id in view.waiting and view.occupancy.is_left(device) and (not kinds or cluster.kind_of(device) in kinds)
    ]
    return "; ".join(words[:_TOLD]) + (f", and {len(words) - _TOLD} more are" if len(words) > _TOLD else "")


def describe_process(outsider: ForeignProcess) -> str:
    """A process of others in words, such as ``process 17 of ada (python, 3.0 GiB)``."""
    whose = f" of {outsider.user}" if outsider.user else ""
    memory = f"{outsider.memory_bytes / (1 << 30):.1f} GiB" if outsider.memory_bytes else ""
    beside = ", ".join(filter(None, (outsider.program, memory)))
    return f"process {outsider.pid}{whose}" + (f" ({beside})" if beside else "")


def _as_far_as_it_goes(draft: Draft | None, short: OutOfHostResources) -> Plan:
    """What was drafted before supplies ran out: a draft is in order after every change."""
    if draft is None or not draft.changes:
        return Plan.NOTHING
    return draft.finish(f"as far as supplies reach: {short}")
