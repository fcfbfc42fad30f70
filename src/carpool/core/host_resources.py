"""Host resources of a node (CPU cores, RAM, disk), and how much of them each job has reserved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_GIB = 1 << 30


class HostResources(NamedTuple):
    """Amounts of what all devices of a node share. Of a node, 0 means that nobody knows, and nothing is checked."""

    cpus: int = 0
    ram_bytes: int = 0
    disk_bytes: int = 0

    def plus(self, other: HostResources) -> HostResources:
        """Both together."""
        return HostResources(
            self.cpus + other.cpus, self.ram_bytes + other.ram_bytes, self.disk_bytes + other.disk_bytes
        )


UNKNOWN = HostResources()


class HostUsage:
    """Which job has taken how much of each node's supplies. A value: taking and giving make another one."""

    __slots__ = ("_by_node",)

    def __init__(self, by_node: Mapping[int, Mapping[str, HostResources]] | None = None) -> None:
        self._by_node = by_node or {}

    def taking(self, node: int, job: str, supplies: HostResources) -> HostUsage:
        """With what a job has of a node; it has nothing there before."""
        return HostUsage({**self._by_node, node: {**self._by_node.get(node, {}), job: supplies}})

    def giving(self, node: int, job: str) -> HostUsage:
        """Without what a job has of a node."""
        there = self._by_node.get(node, {})
        if job not in there:
            return self
        rest = {other: supplies for other, supplies in there.items() if other != job}
        others = {number: jobs for number, jobs in self._by_node.items() if number != node}
        if rest:
            return HostUsage({**others, node: rest})
        return HostUsage(others) if others else NO_USAGE

    def taken(self, node: int, *, but: str = "") -> HostResources:
        """What all jobs but one have of a node."""
        total = UNKNOWN
        for job, supplies in self._by_node.get(node, {}).items():
            total = total if job == but else total.plus(supplies)
        return total


NO_USAGE = HostUsage()  # has taken anything

_WORDS = (("cores", 1), ("GiB RAM", _GIB), ("GiB disk", _GIB))  # what each is called, and in which unit


def resource_shortage(there: HostResources, taken: HostResources, needed: HostResources) -> str:
    """What is not left of a node's supplies, in words; empty where all that is needed is."""
    for (what, unit), has, gone, asked in zip(_WORDS, there, taken, needed, strict=True):
        if has and asked and gone + asked > has:
            return f"{max(0, has - gone) / unit:.4g} of {has / unit:.4g} {what} left, {asked / unit:.4g} needed"
    return ""


def most_devices(there: HostResources, taken: HostResources, each: HostResources) -> int | None:
    """For how many devices the supplies suffice that are left, at so much for each; None: for as many as there are."""
    counts = [max(0, has - gone) // asked for has, gone, asked in zip(there, taken, each, strict=True) if has and asked]
    return min(counts, default=None)


def describe_resources(supplies: HostResources) -> str:
    """Supplies in words, such as ``4 cores, 16 GiB RAM``; empty for none."""
    return ", ".join(
        f"{value / unit:.4g} {what}" for value, (what, unit) in zip(supplies, _WORDS, strict=True) if value
    )
