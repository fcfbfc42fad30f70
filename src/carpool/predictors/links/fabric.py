"""Network fabric: links between devices, nodes and switches, and the routes over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.model import Kind
from carpool.core.topology import Cluster

NETWORK = "network"  # links between nodes, where a cluster declares none


class FabricLink(NamedTuple):
    """A link between two ends, of a link type. Links of one type are assumed equally fast, each way."""

    ends: tuple[str, str]
    kind: str


class Hop(NamedTuple):
    """One link of a route, in one direction."""

    wire: int  # number in the fabric
    is_forward: bool  # from the first end to the second


Route = tuple[Hop, ...]
Tree = dict[str, tuple[str, Hop] | None]  # the end before each end that can be reached, and the link between them
Groups = tuple[tuple[Kind, int], ...]  # as in a placement


class Fabric:
    """Devices, nodes and switches joined by links; speeds are learned per link type.

    A device is called by its number, any other end by a name. Data take the route of the fewest links, the first
    listed on ties.
    """

    def __init__(self, wires: Iterable[FabricLink]) -> None:
        self.wires = tuple(wires)
        self.kinds = tuple(dict.fromkeys(wire.kind for wire in self.wires))  # of link, in order of first appearance
        self._beside: dict[str, list[tuple[str, Hop]]] = {}
        for number, wire in enumerate(self.wires):
            one, other = wire.ends
            self._beside.setdefault(one, []).append((other, Hop(number, is_forward=True)))
            self._beside.setdefault(other, []).append((one, Hop(number, is_forward=False)))
        self._routes: dict[tuple[str, str], Route] = {}
        self._searches: dict[str, tuple[Tree, deque[str]]] = {}
        self._hosts: dict[int, str] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> Fabric:
        """The fabric of a cluster: a bus from each device to its node, by device type, and a network.

        Declared links join the nodes they name, each a link type of its own; nodes without links are joined by
        a switch.
        """
        wires: list[FabricLink] = []
        for node in cluster.nodes:
            for bank in node.banks:
                wires += [FabricLink((str(device), node.name), f"bus of {bank.kind}") for device in bank.devices]
        linked = {end for link in cluster.links for end in link.ends}
        wires += [FabricLink(link.ends, f"link {link.ends[0]}-{link.ends[1]}") for link in cluster.links]
        lone = [node.name for node in cluster.nodes if node.name not in linked]
        if lone and linked:
            lone.append(min(linked))  # so that all nodes are connected
        wires += [FabricLink((name, "switch"), NETWORK) for name in lone] if len(lone) > 1 else []
        return cls(wires)

    def route(self, start: str, end: str) -> Route:
        found = self._routes.get((start, end))
        if found is None:
            found = self._routes[start, end] = self._search(start, end)
        return found

    def host(self, device: int) -> str:
        """The nearest end that is not a device: where a device's input comes from."""
        found = self._hosts.get(device)
        if found is None:
            found = self._hosts[device] = next(
                (name for name, _ in self._beside.get(str(device), ()) if not name.isdigit()), str(device)
            )
        return found

    def in_order(self, devices: Sequence[int]) -> list[int]:
        """Devices in a chain from the lowest, always continuing with the nearest remaining one."""
        left = sorted(devices)
        order = left[:1]
        del left[:1]
        while left:
            nearest = min(left, key=lambda device: (len(self.route(str(order[-1]), str(device))), device))
            left.remove(nearest)
            order.append(nearest)
        return order

    def _search(self, start: str, end: str) -> Route:
        """Breadth-first search, continuing where the last one from there stopped."""
        came, edge = self._searches.setdefault(start, ({start: None}, deque([start])))
        while edge and end not in came:
            here = edge.popleft()
            for there, hop in self._beside.get(here, ()):
                if there not in came:
                    came[there] = here, hop
                    edge.append(there)
        if end not in came:
            raise InputError(f"no link leads from {start!r} to {end!r}", way_out="Join them in the cluster's links.")
        hops: list[Hop] = []
        step = came[end]
        while step is not None:
            hops.append(step[1])
            step = came[step[0]]
        return tuple(reversed(hops))


def representative_devices(cluster: Cluster, groups: Groups) -> tuple[int, ...] | None:
    """Devices that stand for a placement: each group on the first node that has it; None if there is none."""
    used: set[tuple[int, Kind]] = set()
    found: list[int] = []
    for kind, count in sorted(groups, key=lambda group: -group[1]):
        for node in cluster.nodes:
            mine = [device for bank in node.banks if bank.kind == kind for device in bank.devices]
            if len(mine) >= count and (node.id, kind) not in used:
                used.add((node.id, kind))
                found += mine[:count]
                break
        else:
            return None
    return tuple(sorted(found))
