"""Host resources of a node (CPU cores, RAM, disk), and how much of them each job has reserved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_GIB = 1 << 30


class HostResources(NamedTuple):
    """Resources that all devices of a node share. For a node, 0 means unknown, and is not checked."""

    cpus: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0

    def plus(self, other: HostResources) -> HostResources:
        return HostResources(
            self.cpus + other.cpus, self.ram_bytes + other.ram_bytes, self.disk_bytes + other.disk_bytes
        )


UNKNOWN = HostResources()


class HostUsage:
    """Host resources reserved by each job on each node. Immutable: `taking` and `giving` return a new value."""

    __slots__ = ("_by_node",)

    def __init__(self, by_node: Mapping[int, Mapping[str, HostResources]] | None = None) -> None:
        self._by_node = by_node or {}

    def taking(self, node: int, job: str, resources: HostResources) -> HostUsage:
        return HostUsage({**self._by_node, node: {**self._by_node.get(node, {}), job: resources}})

    def giving(self, node: int, job: str) -> HostUsage:
        there = self._by_node.get(node, {})
        if job not in there:
            return self
        rest = {other: resources for other, resources in there.items() if other != job}
        others = {number: jobs for number, jobs in self._by_node.items() if number != node}
        if rest:
            return HostUsage({**others, node: rest})
        return HostUsage(others) if others else NO_USAGE

    def taken(self, node: int, *, but: str = "") -> HostResources:
        total = UNKNOWN
        for job, resources in self._by_node.get(node, {}).items():
            total = total if job == but else total.plus(resources)
        return total


NO_USAGE = HostUsage()

_WORDS = (("cores", 1), ("GiB RAM", _GIB), ("GiB disk", _GIB))  # name and unit of each


def resource_shortage(there: HostResources, taken: HostResources, needed: HostResources) -> str:
    """The first resource a node has too little of, in words; empty if none."""
    for (what, unit), has, gone, asked in zip(_WORDS, there, taken, needed, strict=True):
        if has and asked and gone + asked > has:
            return f"{max(0, has - gone) / unit:.4g} of {has / unit:.4g} {what} left, {asked / unit:.4g} needed"
    return ""


def most_devices(there: HostResources, taken: HostResources, each: HostResources) -> int | None:
    """For how many devices the remaining resources suffice; None: no limit."""
    counts = [max(0, has - gone) // asked for has, gone, asked in zip(there, taken, each, strict=True) if has and asked]
    return min(counts, default=None)


def describe_resources(resources: HostResources) -> str:
    """Such as ``4 cores, 16 GiB RAM``; empty for none."""
    return ", ".join(
        f"{value / unit:.4g} {what}" for value, (what, unit) in zip(resources, _WORDS, strict=True) if value
    )
