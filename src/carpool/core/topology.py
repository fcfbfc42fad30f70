"""Cluster topology: device types, nodes, links, and the placement of an allocation on them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import log2
from typing import NamedTuple

from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, Kind, NodeId, Share


@dataclass(frozen=True, slots=True)
class Bank:
    """A run of like devices inside one node."""

    kind: Kind
    devices: range
    memory_bytes: int = 0  # of each device; 0: unknown, not checked


@dataclass(frozen=True, slots=True)
class Node:
    """A host: one or more banks of devices with consecutive ids."""

    id: NodeId
    name: str
    banks: tuple[Bank, ...]
    resources: HostResources = UNKNOWN
    devices: range = field(init=False, compare=False, repr=False)  # every device of the node

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", range(self.banks[0].devices.start, self.banks[-1].devices.stop))

    @property
    def bank_sizes(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, number of devices, memory of each) of the banks."""
        return tuple([(str(bank.kind), len(bank.devices), bank.memory_bytes) for bank in self.banks])


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two ends (``node:a``, ``rack:1`` …) with a speed and a start-up time."""

    ends: tuple[str, str]
    bytes_per_s: float
    latency_s: float = 0.0


class Path(NamedTuple):
    """The slowest way between the nodes of a placement; rounded, so that links of one speed are equal values."""

    bytes_per_s: float
    latency_s: float = 0.0

    def rounded(self) -> Path:
        return Path(_rounded(self.bytes_per_s, _SPEED_STEPS), _rounded(self.latency_s, _LATENCY_STEPS))


_SPEED_STEPS, _LATENCY_STEPS = 8, 2  # per factor of two: speeds are rounded by at most 4.4 %


def _rounded(value: float, steps: int) -> float:
    return 2.0 ** (round(log2(value) * steps) / steps) if value > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another job that shares a device with the job in question."""

    spec: JobSpec
    fraction: float = 1.0
    batch_size: int = 0
    turn: int = 0
    groups: tuple[tuple[Kind, int], ...] = ()  # all its devices, as in its own placement; empty: unknown


@dataclass(frozen=True, slots=True)
class Placement:
    """An allocation as a rate model sees it: device types and counts per node, and the jobs beside it.

    ``groups`` has one (kind, count) per node and kind, in ascending order, so equal shapes are equal values.
    """

    groups: tuple[tuple[Kind, int], ...]
    fraction: float = 1.0
    batch_size: int = 0
    neighbours: tuple[Neighbour, ...] = ()
    turn: int = 0
    # largest sum of neighbours' fractions on one device, if not every neighbour is on every device; else 0
    beside: float = 0.0
    path: Path | None = None  # between its nodes; None: on one node, or unknown

    @property
    def num_devices(self) -> int:
        groups = self.groups
        return groups[0][1] if len(groups) == 1 else sum([count for _, count in groups])

    @property
    def load(self) -> float:
        """Sum of all fractions on the fullest of its devices; above 1.0 shares are virtual."""
        return self.fraction + (self.beside or sum([neighbour.fraction for neighbour in self.neighbours]))

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(kind for kind, _ in self.groups)

    def among(self, others: Iterable[Mapping[JobId, Neighbour]]) -> Placement:
        """The same with neighbours, given for each of its devices in turn."""
        found: dict[JobId, Neighbour] = {}
        busiest = 0.0
        for there in others:
            found.update(there)
            busiest = max(busiest, sum([neighbour.fraction for neighbour in there.values()]))
        if not found:
            return self
        neighbours = tuple(found.values())
        is_everywhere = busiest >= sum([neighbour.fraction for neighbour in neighbours])
        return replace(self, neighbours=neighbours, beside=0.0 if is_everywhere else busiest)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes, numbered from 0, their devices numbered through."""

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    max_nodes: int = 0  # that a job may run on unless it says otherwise; 0: any number
    capacity: dict[Kind, int] = field(init=False, compare=False, repr=False)  # devices of each kind
    node_size: dict[Kind, int] = field(init=False, compare=False, repr=False)  # most devices of each kind in one node
    least_memory: dict[Kind, int] = field(init=False, compare=False, repr=False)  # of a device of each kind; 0: unknown
    num_devices: int = field(init=False, compare=False, repr=False)
    _paths: dict[tuple[int, int], Path] = field(init=False, compare=False, repr=False)  # by nodes, the lower first
    _fastest: dict[int, Path] = field(init=False, compare=False, repr=False)  # of each node's known links
    _firsts: list[int] = field(init=False, compare=False, repr=False)
    _whole: dict[tuple[Kind, int], Placement] = field(init=False, compare=False, repr=False)  # see `placement`

    def __post_init__(self) -> None:
        capacity: dict[Kind, int] = {}
        node_size: dict[Kind, int] = {}
        least_memory: dict[Kind, int] = {}
        expected = 0
        for index, node in enumerate(self.nodes):
            assert node.id == index, f"node {node.name!r} has id {node.id}, its place is {index}"
            here: dict[Kind, int] = {}
            for bank in node.banks:
                assert bank.devices.start == expected, f"device ids of node {node.name!r} start at {bank.devices.start}"
                expected = bank.devices.stop
                size = len(bank.devices)
                capacity[bank.kind] = capacity.get(bank.kind, 0) + size
                here[bank.kind] = here.get(bank.kind, 0) + size
                node_size[bank.kind] = max(here[bank.kind], node_size.get(bank.kind, 0))
                known = [memory for memory in (bank.memory_bytes, least_memory.get(bank.kind, 0)) if memory]
                least_memory[bank.kind] = min(known, default=0)
        put = object.__setattr__
        put(self, "capacity", capacity)
        put(self, "node_size", node_size)
        put(self, "least_memory", least_memory)
        put(self, "num_devices", expected)
        put(self, "_firsts", [node.devices.start for node in self.nodes])
        put(self, "_whole", {})
        put(self, "_paths", {})
        put(self, "_fastest", {})
        if self.links:
            self._index_links()

    def _index_links(self) -> None:
        """Find links by the nodes they join; links of racks and devices are left to `predictors.links`."""
        numbers = {node.name: node.id for node in self.nodes}
        for link in self.links:
            one, other = (numbers.get(end) for end in link.ends)
            if one is None or other is None or one == other:
                continue
            path = Path(link.bytes_per_s, link.latency_s)
            self._paths[min(one, other), max(one, other)] = path
            for node in (one, other):
                known = self._fastest.get(node, path)
                self._fastest[node] = Path(
                    max(known.bytes_per_s, path.bytes_per_s), min(known.latency_s, path.latency_s)
                )

    @classmethod
    def build(cls, groups: Iterable[tuple[int, int, str]]) -> Cluster:
        """Like nodes in groups of (number of nodes, devices per node, kind)."""
        nodes: list[Node] = []
        first = 0
        for num_nodes, size, kind in groups:
            for _ in range(num_nodes):
                bank = Bank(Kind(kind), range(first, first + size))
                nodes.append(Node(NodeId(len(nodes)), f"n{len(nodes)}", (bank,)))
                first += size
        return cls(tuple(nodes))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(self.capacity)

    def nodes_for(self, spec: JobSpec) -> int:
        """How many nodes a job may run on; 0: any number, where the cluster sets no limit."""
        return self.max_nodes and (spec.max_nodes or self.max_nodes)

    def link_between(self, one: int, other: int) -> Path | None:
        """The way between two nodes: measured, else assumed from the fastest known links of both; None: unknown."""
        found = self._paths.get((one, other) if one < other else (other, one))
        if found is not None:
            return found
        ends = self._fastest.get(one), self._fastest.get(other)
        if ends[0] is None or ends[1] is None:
            return None
        return Path(min(ends[0].bytes_per_s, ends[1].bytes_per_s), max(ends[0].latency_s, ends[1].latency_s))

    def path(self, nodes: Collection[int]) -> Path | None:
        """The lowest speed and highest latency known between any two of these nodes; None if none is known."""
        if len(nodes) < 2 or not self._paths:
            return None
        known = [path for pair in combinations(sorted(nodes), 2) if (path := self.link_between(*pair)) is not None]
        if not known:
            return None
        return Path(min([path.bytes_per_s for path in known]), max([path.latency_s for path in known])).rounded()

    def fastest_path(self) -> Path | None:
        """The fastest of the known ways between two nodes; None if none is known."""
        if not self._paths:
            return None
        return max(self._paths.values(), key=lambda path: (path.bytes_per_s, -path.latency_s)).rounded()

    def knows_link(self, one: str, other: str) -> bool:
        """Whether the link between two nodes has been declared or measured itself."""
        return any(link.ends in ((one, other), (other, one)) for link in self.links)

    def with_link(self, link: Link) -> Cluster:
        """A cluster with a link instead of the one between the same ends."""
        ends = set(link.ends)
        return replace(self, links=(*[each for each in self.links if set(each.ends) != ends], link))

    def node_of(self, device: int) -> Node:
        return self.nodes[bisect_right(self._firsts, device) - 1]

    def spot(self, device: int) -> tuple[Node, Bank]:
        node = self.nodes[bisect_right(self._firsts, device) - 1]
        banks = node.banks
        if len(banks) == 1:
            return node, banks[0]
        return node, next(bank for bank in banks if device in bank.devices)

    def bank_of(self, device: int) -> Bank:
        return self.spot(device)[1]

    def kind_of(self, device: int) -> Kind:
        return self.bank_of(device).kind

    def device_name(self, device: DeviceId) -> str:
        """Such as ``n3:0``: the node's name and the place inside it."""
        node = self.node_of(device)
        return f"{node.name}:{device - node.devices.start}"

    def placement(self, allocation: Allocation) -> Placement:
        """An allocation as a rate model sees it, without neighbours."""
        shares = allocation.shares
        if len(shares) == 1:
            share = shares[0]
            run = share.devices
            bank = self.spot(run.start)[1]
            if run.stop <= bank.devices.stop:
                return self._on_one_node(bank.kind, len(run), share, allocation.batch_size)
        fraction = min([share.fraction for share in shares])
        turn = max([share.turn for share in shares])
        path = self.path(self.nodes_of(allocation)) if self._paths else None
        return Placement(self.groups_of(allocation), fraction, allocation.batch_size, turn=turn, path=path)

    def nodes_of(self, allocation: Allocation) -> set[int]:
        """The numbers of the nodes that an allocation touches."""
        runs = [share.devices for share in allocation.shares]
        spans = [(self.node_of(run.start).id, self.node_of(run.stop - 1).id) for run in runs]
        return {node for first, last in spans for node in range(first, last + 1)}

    def _on_one_node(self, kind: Kind, count: int, share: Share, batch_size: int) -> Placement:
        """Nearly every allocation is of whole devices on one node: those placements are cached."""
        if share.fraction != 1.0 or batch_size or share.turn:
            return Placement(((kind, count),), share.fraction, batch_size, turn=share.turn)
        placement = self._whole.get((kind, count))
        if placement is None:
            placement = self._whole[kind, count] = Placement(((kind, count),))
        return placement

    def groups_of(self, allocation: Allocation) -> tuple[tuple[Kind, int], ...]:
        """(kind, count) for every node and kind the allocation touches, ascending."""
        counts: dict[tuple[int, Kind], int] = {}
        for share in allocation.shares:
            first, stop = share.devices.start, share.devices.stop
            while first < stop:
                node, bank = self.spot(first)
                end = min(stop, bank.devices.stop)
                key = (node.id, bank.kind)
                counts[key] = counts.get(key, 0) + end - first
                first = end
        return tuple(sorted([(kind, count) for (_, kind), count in counts.items()]))

    def joined(self, name: str, banks: Iterable[tuple[str, int, int]], resources: HostResources = UNKNOWN) -> Cluster:
        """A cluster with one more node, of (kind, number of devices, memory of each) banks."""
        return self.with_nodes([(name, banks, resources)])

    def with_join(
        self,
        name: str,
        banks: Iterable[tuple[str, int, int]],
        resources: HostResources = UNKNOWN,
        replaces: str = "",
    ) -> Cluster:
        """The cluster after a node has joined: a known one, a new one, or a new one in the place of another."""
        if any(node.name == name for node in self.nodes):
            return self
        if (place := next((node for node in self.nodes if node.name == replaces), None)) is None:
            return self.joined(name, banks, resources)
        nodes = list(self.nodes)
        nodes[place.id] = replace(place, name=name, resources=resources)
        links = tuple([link for link in self.links if place.name not in link.ends])
        return replace(self, nodes=tuple(nodes), links=links)

    def with_nodes(self, nodes: Iterable[tuple[str, Iterable[tuple[str, int, int]], HostResources]]) -> Cluster:
        """A cluster with more nodes, each of a name, banks and host resources."""
        first, built = self.num_devices, list(self.nodes)
        for name, given, resources in nodes:
            banks: list[Bank] = []
            for kind, size, memory_bytes in given:
                banks.append(Bank(Kind(kind), range(first, first + size), memory_bytes))
                first += size
            built.append(Node(NodeId(len(built)), name, tuple(banks), resources))
        return replace(self, nodes=tuple(built))

    def with_resources(self, node: NodeId, resources: HostResources) -> Cluster:
        nodes = list(self.nodes)
        nodes[node] = replace(nodes[node], resources=resources)
        return replace(self, nodes=tuple(nodes))
