"""Rejoining a cluster: the facts that say that this machine went away and came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.messages import Fact, NodeJoined, NodeLost
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Node
from carpool.jobs.devices import NODE_NAME, LocalDevice, as_cluster

Banks = tuple[tuple[str, int, int], ...]  # (device type, number of devices, memory of each)


class RejoinedNode(NamedTuple):
    """This machine as a node of the cluster, its devices numbered as the cluster numbers them."""

    name: str
    banks: Banks
    devices: tuple[LocalDevice, ...]
    supplies: HostResources = UNKNOWN

    def facts(self, scheduler: Scheduler) -> list[Fact]:
        """This machine was lost under every name it had, and rejoins."""
        lost = scheduler.snapshot().occupancy.lost
        gone: list[Fact] = [
            NodeLost(node.id) for node in scheduler.cluster.nodes if is_local(node) and node.id not in lost
        ]
        return [*gone, NodeJoined(self.name, self.banks, self.supplies if any(self.supplies) else ())]


def is_local(node: Node) -> bool:
    """Whether a node is this machine: under its first name, or one it got with other devices."""
    return node.name == NODE_NAME or node.name.startswith(f"{NODE_NAME}-")


def rejoined_node(cluster: Cluster, devices: Sequence[LocalDevice], supplies: HostResources = UNKNOWN) -> RejoinedNode:
    """This machine in a cluster; with devices that it never had before it is a new node."""
    banks = _banks(as_cluster(devices).nodes[0])
    for node in reversed(cluster.nodes):
        if is_local(node) and _banks(node) == banks:
            return RejoinedNode(node.name, banks, _numbered(devices, node.devices.start), supplies)
    name = f"{NODE_NAME}-{len(cluster.nodes) + 1}"
    return RejoinedNode(name, banks, _numbered(devices, cluster.num_devices), supplies)


def _banks(node: Node) -> Banks:
    return tuple((str(bank.kind), len(bank.devices), bank.memory_bytes) for bank in node.banks)


def _numbered(devices: Sequence[LocalDevice], first: int) -> tuple[LocalDevice, ...]:
    return tuple(replace(device, id=first + place) for place, device in enumerate(devices))
