"""Feasibility check: rejects jobs that can never run on the cluster's devices."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.constraints.resource_limits import supported_devices
from carpool.core.errors import InputError, UnknownName
from carpool.core.host_resources import HostResources, describe_resources, resource_shortage
from carpool.core.model import JobSpec
from carpool.core.occupancy import Occupancy
from carpool.core.topology import Cluster
from carpool.core.units import format_bytes
from carpool.jobs.job_file import ListedJob


def check_fit(jobs: Sequence[ListedJob], cluster: Cluster) -> list[str]:
    """InputError if a job can never run on these devices. Returns notes about jobs that cannot use all they ask for."""
    notes = []
    for spec, _ in jobs:
        unknown = next((kind for kind in spec.kinds if kind not in cluster.capacity), None)
        if unknown is not None:
            raise UnknownName("device type", unknown, cluster.capacity, where=f"job {spec.id!r}: kinds")
        of_each = [count for kind, count in cluster.capacity.items() if not spec.kinds or kind in spec.kinds]
        most = cluster.nodes_for(spec)
        there = _most_together(spec, cluster) if most else sum(of_each)
        if spec.narrowest > there:
            of_kind = f" of {' or '.join(spec.kinds)}" if spec.kinds else ""
            on_one = " on one node, and it runs on one node (max_nodes)" if most == 1 else ""
            raise InputError(
                f"job {spec.id!r} needs {spec.narrowest} devices{of_kind}; there are {there}{on_one}",
                way_out="Lower devices or min_devices, or add devices with --devices.",
            )
        if spec.narrowest > max(of_each):
            notes.append(
                f"job {spec.id!r} needs {spec.narrowest} devices, more than there are of any device type: it runs only "
                "under a policy that mixes device types (carpool, elastic, hare, or your own)"
            )
        if spec.widest > there:
            notes.append(f"job {spec.id!r} could use {spec.widest} devices; there are {there}")
        sizes = [cluster.least_memory[kind] for kind in cluster.kinds if not spec.kinds or kind in spec.kinds]
        needs = f"job {spec.id!r} needs {format_bytes(spec.memory_bytes)}"
        if sizes and all(0 < size < spec.memory_bytes for size in sizes):
            raise InputError(
                f"{needs} of device memory; the largest has {format_bytes(max(sizes))}",
                way_out="Lower memory, or remove it.",
            )
        ram = max(node.resources.ram_bytes for node in cluster.nodes)
        if not any(sizes) and 0 < ram < spec.memory_bytes:  # devices that are CPU cores
            raise InputError(
                f"{needs} of memory; the largest node has {format_bytes(ram)}",
                way_out="Lower memory, or remove it.",
            )
        _check_supplies(spec, cluster)
    return notes


def _most_together(spec: JobSpec, cluster: Cluster) -> int:
    """Devices that a job may use on the nodes that it may use."""
    sizes = [
        sum(len(bank.devices) for bank in node.banks if not spec.kinds or bank.kind in spec.kinds)
        for node in cluster.nodes
    ]
    return sum(sorted(sizes, reverse=True)[: cluster.nodes_for(spec)])


def _check_supplies(spec: JobSpec, cluster: Cluster) -> None:
    """InputError if even idle nodes lack the cores, RAM or disk that a job needs."""
    nodes = [node for node in cluster.nodes if not spec.kinds or any(bank.kind in spec.kinds for bank in node.banks)]
    idle = Occupancy(cluster)
    shorts = [
        short for node in nodes if (short := resource_shortage(node.resources, HostResources(), spec.resources_for(1)))
    ]
    if spec.needs_host_resources and len(shorts) == len(nodes):
        raise InputError(
            f"job {spec.id!r} needs {describe_resources(spec.resources_for(1))} per device; the largest node has "
            f"{describe_resources(max(node.resources for node in nodes))}",
            way_out="Lower cpus, ram or disk, or remove them.",
        )
    most = sum(supported_devices(idle, spec))
    if most < spec.narrowest:
        raise InputError(
            f"job {spec.id!r} needs {spec.narrowest} devices with {describe_resources(spec.resources_for(1))} each; "
            f"the nodes have enough for {most}",
            way_out="Lower cpus or ram, or devices or min_devices.",
        )
