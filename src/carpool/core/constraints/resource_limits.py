"""Host resource limits: keep a policy's plan within the cores, RAM and disk of each node."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from carpool.core.draft import Draft
from carpool.core.errors import OutOfHostResources, SpansNodes
from carpool.core.host_resources import resource_shortage
from carpool.core.messages import ForeignProcess, OutsidersSeen
from carpool.core.model import DeviceId, Job, JobId, JobSpec, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Plan, Snapshot
from carpool.core.topology import Node

_NAMED = 3  # nodes named in a message


def plan_within_resources(view: Snapshot, attempt: Callable[[], Plan]) -> Plan:
    """The first plan that stays within the host resources of all nodes.

    Policies choose devices only. Where a node lacks cores, RAM or disk for a job, the policy plans again: with a
    waiting job narrowed, then hidden together with all waiting jobs that fit nowhere either, and with a running job
    fixed to its size. So there is at most one attempt per distinct demand. If the policy still assigns the job, the
    plan is cut before it. A job with a limited number of nodes is shown with no more devices than these have.
    """
    narrowed = _within_nodes(view) if view.cluster.max_nodes else {}
    scattered: list[JobId] = []
    short: OutOfHostResources | None = None
    if not narrowed:
        try:
            return attempt()
        except OutOfHostResources as error:
            short = error
    plan = _plan_narrowed(view, attempt, narrowed, short, scattered)
    return _place_scattered(view, scattered) if plan is Plan.NOTHING and scattered else plan


def _place_scattered(view: Snapshot, jobs: Sequence[JobId]) -> Plan:
    """Place jobs that the policy spread over more than `max_nodes` nodes on fewer, if these have enough free devices.

    Only for a policy that plans nothing else: one that always chooses the same devices would never start them.
    """
    draft = Draft(view)
    placed = [name for name in jobs if draft.place(view.jobs[name], view.jobs[name].spec.narrowest)]
    return draft.finish(f"{', '.join(placed)} on fewer nodes than the policy chose") if placed else Plan.NOTHING


def _within_nodes(view: Snapshot) -> dict[JobId, Job]:
    """Jobs whose `max_devices` exceeds what `max_nodes` nodes have, with `max_devices` lowered to that."""
    found: dict[JobId, Job] = {}
    most: dict[tuple[tuple[Kind, ...], int], int] = {}  # by accepted types and number of nodes
    for name, job in view.jobs.items():
        spec = job.spec
        nodes = view.cluster.nodes_for(spec)
        if (spec.kinds, nodes) not in most:
            plain = replace(spec, cpus=0, ram_bytes=0, disk_bytes=0)
            most[spec.kinds, nodes] = sum(supported_devices(view.occupancy, plain))
        width = most[spec.kinds, nodes]
        if spec.narrowest <= width < spec.widest:
            fewer = replace(spec, devices=min(spec.devices, width), min_devices=spec.narrowest, max_devices=width)
            found[name] = job._replace(spec=fewer)
    return found


def _plan_narrowed(
    view: Snapshot,
    attempt: Callable[[], Plan],
    shown: dict[JobId, Job],
    short: OutOfHostResources | None,
    scattered: list[JobId],
) -> Plan:
    """Plan with some jobs limited; after each shortage, with one more of them limited or hidden.

    Hidden jobs that the policy placed on too many nodes are appended to `scattered`.
    """
    hidden: set[JobId] = set()
    limited: set[JobId] = set()  # running jobs that a shortage has fixed to what they hold
    jobs, view.jobs = view.jobs, ChainMap(shown, dict(view.jobs))
    keys = {entry[2]: entry[0] for entry in view.waiting.entries()}
    try:
        for name in shown.keys() & keys.keys():
            view.waiting.put(shown[name], keys[name])
        while True:
            if short is None:
                try:
                    return attempt()
                except OutOfHostResources as error:
                    short = error
            job, draft = view.jobs[JobId(short.job)], short.draft if isinstance(short.draft, Draft) else None
            if job.id in hidden or job.id in limited:
                return _cut_plan(draft, short)
            narrower = _narrowed(view, job)
            if narrower is not None:
                shown[job.id] = narrower
                if job.desired is None:
                    view.waiting.put(narrower, keys[job.id])
                else:
                    limited.add(job.id)
            else:
                scattered += [job.id] if isinstance(short, SpansNodes) else []
                for other in _unsupported(view, job, draft):
                    hidden.add(other.id)
                    view.waiting.discard(other.id)
            short = None
    finally:
        view.jobs = jobs
        for name in {*shown, *hidden} & keys.keys():
            view.waiting.put(jobs[name], keys[name])


def _narrowed(view: Snapshot, job: Job) -> Job | None:
    """A job limited to fewer devices; None if it accepts no fewer.

    A running job is limited to what it holds. A waiting job is limited to the devices that all nodes have resources
    for, then one node, then its minimum.
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


def _unsupported(view: Snapshot, job: Job, draft: Draft | None) -> list[Job]:
    """A waiting job, and the others that no node has resources for after the draft's changes."""
    found = [job]
    fits: dict[object, bool] = {}  # by demand
    if draft is None:
        return found
    for name in view.waiting:
        spec = view.jobs[name].spec
        if name == job.id or name in draft.changes or not spec.needs_host_resources:
            continue
        demand = spec.kinds, spec.narrowest, spec.resources_for(1)
        if demand not in fits:
            fits[demand] = sum(supported_devices(draft.occupancy, spec)) >= spec.narrowest
        if not fits[demand]:
            found.append(view.jobs[name])
    return found


def supported_devices(occupancy: Occupancy, spec: JobSpec) -> list[int]:
    """For how many devices of a job each node has host resources, whether or not the devices are free.

    Where a job may use a limited number of nodes, only of that many of the largest.
    """
    rooms = []
    for node in occupancy.cluster.nodes:
        size = sum(len(bank.devices) for bank in node.banks if not spec.kinds or bank.kind in spec.kinds)
        if size and node.id not in occupancy.lost:
            most = occupancy.most_for(spec, node)
            rooms.append(size if most is None else min(most, size))
    most_nodes = occupancy.cluster.nodes_for(spec)
    return sorted(rooms, reverse=True)[:most_nodes] if most_nodes else rooms


def describe_shortage(view: Snapshot, job: Job) -> str:
    """The host resources a waiting job lacks, in words; empty if none."""
    spec, occupancy = job.spec, view.occupancy
    if (
        job.id not in view.waiting
        or not spec.needs_host_resources
        or sum(supported_devices(occupancy, spec)) >= spec.narrowest
    ):
        return ""
    needed = spec.resources_for(spec.narrowest)
    nodes = [node for node in view.cluster.nodes if node.id not in occupancy.lost]
    shortages = [
        (node, resource_shortage(node.resources, occupancy.host_usage.taken(node.id), needed)) for node in nodes
    ]
    words = [f"node {node.name} has {short}" for node, short in shortages if short]
    more = f" and {len(words) - _NAMED} more nodes" if len(words) > _NAMED else ""
    return "; ".join(words[:_NAMED]) + more


def describe_scatter(view: Snapshot, job: Job) -> str:
    """Why a waiting job does not run although enough devices are free, if they are on too many nodes; else empty."""
    occupancy, spec = view.occupancy, job.spec
    most, needed = occupancy.cluster.nodes_for(spec), spec.narrowest
    if not most or job.id not in view.waiting:
        return ""
    by_node = sorted([_num_free(occupancy, node, spec.kinds) for node in occupancy.cluster.nodes], reverse=True)
    free = sum(by_node)
    if free < needed or sum(by_node[:most]) >= needed:
        return ""
    limit = "one node" if most == 1 else f"at most {most} nodes"
    return f"{free} devices are free, but on several nodes; it needs {needed}, and a job runs on {limit}"


def _num_free(occupancy: Occupancy, node: Node, kinds: Sequence[Kind]) -> int:
    """Free devices of a node, of these types or, without any, of all."""
    mask, first = occupancy.free_mask(node.id), node.devices.start
    banks = [bank.devices for bank in node.banks if not kinds or bank.kind in kinds]
    return sum([(mask >> (bank.start - first) & (1 << len(bank)) - 1).bit_count() for bank in banks])


def describe_foreign_use(view: Snapshot, job: Job, outsiders: Mapping[DeviceId, OutsidersSeen]) -> str:
    """The devices a waiting job cannot use because of foreign processes, in words; empty if none."""
    kinds, cluster = job.spec.kinds, view.cluster
    words = [
        f"{cluster.device_name(device)} is in use by {' and '.join(map(describe_process, seen.processes[:_NAMED]))}"
        for device, seen in sorted(outsiders.items())
        if job.id in view.waiting
        and view.occupancy.is_foreign(device)
        and (not kinds or cluster.kind_of(device) in kinds)
    ]
    return "; ".join(words[:_NAMED]) + (f" and {len(words) - _NAMED} more devices" if len(words) > _NAMED else "")


def describe_process(process: ForeignProcess) -> str:
    """Such as ``process 17 of ada (python, 3.0 GiB)``."""
    whose = f" of {process.user}" if process.user else ""
    memory = f"{process.memory_bytes / (1 << 30):.1f} GiB" if process.memory_bytes else ""
    beside = ", ".join(filter(None, (process.program, memory)))
    return f"process {process.pid}{whose}" + (f" ({beside})" if beside else "")


def _cut_plan(draft: Draft | None, short: OutOfHostResources) -> Plan:
    """The changes drafted before the shortage: a draft is valid after every change."""
    if draft is None or not draft.changes:
        return Plan.NOTHING
    return draft.finish(f"limited by host resources: {short}")
