"""Fleet: members that form one cluster, and the decision which member gets an order; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from carpool.core.errors import InputError
from carpool.core.host_resources import UNKNOWN, HostResources
from carpool.core.messages import Assign, Fact, NodeJoined, NodeLost, Order, Release
from carpool.core.model import DeviceId, JobId
from carpool.core.topology import Cluster
from carpool.jobs.devices import NODE_NAME, LocalDevice, as_cluster

LOCAL = NODE_NAME  # the executor of this machine

Owner = Callable[[DeviceId], str]  # the name of the executor that owns a device
Banks = tuple[tuple[str, int, int], ...]  # (device type, number of devices, memory of each)


@dataclass(frozen=True, slots=True)
class Member:
    """One machine of a fleet; its devices are numbered from 0. A member that has not been reached has none yet."""

    name: str
    devices: tuple[LocalDevice, ...]
    supplies: HostResources = UNKNOWN


class MemberNode(NamedTuple):
    """A member as a node of the cluster, its devices numbered as the cluster numbers them."""

    name: str
    banks: Banks
    devices: tuple[LocalDevice, ...]
    supplies: HostResources = UNKNOWN
    replaces: str = ""  # the lost node of another machine whose place it takes

    def rejoin(self, cluster: Cluster, lost: Collection[int], member: str) -> list[Fact]:
        """The member was lost under every name it had, and rejoins."""
        return [*loss_of(cluster, lost, member), self.joined]

    @property
    def joined(self) -> NodeJoined:
        return NodeJoined(self.name, self.banks, self.supplies if any(self.supplies) else (), self.replaces)


def fleet_cluster(members: Sequence[Member]) -> Cluster:
    """One node per member; a job runs on one node unless its `max_nodes` says otherwise."""
    names = [member.name for member in members]
    for name, times in Counter(names).items():
        if times > 1:
            raise InputError(f"two members have the name {name!r}", way_out="Give every member its own name.")
    there = [member for member in members if member.devices]
    nodes = [(member.name, as_cluster(member.devices).nodes[0].bank_sizes, member.supplies) for member in there]
    return Cluster((), max_nodes=1 if names != [LOCAL] else 0).with_nodes(nodes)


def is_of(node: str, member: str) -> bool:
    """Whether a node is a member: under its first name, or one it got with other devices."""
    return node == member or node.startswith(f"{member}-" if member == LOCAL else f"{member}@")


def loss_of(cluster: Cluster, lost: Collection[int], member: str) -> list[Fact]:
    """A member was lost under every name it had."""
    return [NodeLost(node.id) for node in cluster.nodes if is_of(node.name, member) and node.id not in lost]


def member_node(cluster: Cluster, member: Member, free: Collection[str] = ()) -> MemberNode:
    """A member in a cluster; with devices that it never had before it is a new node.

    Nodes are recognized by name first: two machines of one shape stay two. A new node takes the place of a free one
    with equal devices: one that is lost, and whose machine is no longer a member.
    """
    banks = as_cluster(member.devices).nodes[0].bank_sizes
    for node in reversed(cluster.nodes):
        if is_of(node.name, member.name) and node.bank_sizes == banks:
            return MemberNode(node.name, banks, _numbered(member.devices, node.devices.start), member.supplies)
    name = member.name
    if any(is_of(node.name, name) for node in cluster.nodes) or name == LOCAL:
        name = _free_name(cluster, f"{name}{'-' if name == LOCAL else '@'}")
    for node in cluster.nodes:
        if node.name in free and node.bank_sizes == banks:
            devices = _numbered(member.devices, node.devices.start)
            return MemberNode(name, banks, devices, member.supplies, node.name)
    return MemberNode(name, banks, _numbered(member.devices, cluster.num_devices), member.supplies)


def _free_name(cluster: Cluster, start: str) -> str:
    taken = {node.name for node in cluster.nodes}
    return next(name for number in count(len(taken) + 1) if (name := f"{start}{number}") not in taken)


def device_names(nodes: Mapping[str, MemberNode]) -> dict[int, str]:
    """The name of every device by number, with its member's name where there are several."""
    return {
        device.id: device.name if member == LOCAL else f"{member}/{device.name}"
        for member, node in nodes.items()
        for device in node.devices
    }


def _numbered(devices: Sequence[LocalDevice], first: int) -> tuple[LocalDevice, ...]:
    return tuple(replace(device, id=first + place) for place, device in enumerate(devices))


class Routed(NamedTuple):
    """The immediate effects of an order."""

    orders: Mapping[str, Order]  # by executor
    hand_over: tuple[str, ...] = ()  # executors that first write the job's state to disk and drop it


class OrderRouter:
    """Decides which executors get an order.

    An `Assign` goes to one executor, which leads the job and has workers started on devices of others: the one that
    holds the job's state if it owns some of the devices, else the owner of the first. If another one holds the state,
    it first hands it over, and the `Assign` waits for that.

    A `Release` goes to the executors that hold the job; with none, to every executor.
    """

    def __init__(self, names: Collection[str], owner: Owner) -> None:
        self._names = tuple(names)
        self._owner = owner
        self._holders: dict[JobId, frozenset[str]] = {}  # executors that have the job's newest state
        self._leaving: dict[JobId, frozenset[str]] = {}  # those of them that are handing it over
        self._waiting: dict[JobId, Assign] = {}  # orders that wait for a handover

    def add(self, name: str) -> None:
        self._names = (*self._names, *({name} - set(self._names)))

    def remove(self, name: str) -> list[Assign]:
        """Forget an executor for good, with all it held. Returns the orders that waited for it."""
        self._names = tuple(each for each in self._names if each != name)
        return self.on_lost(name)

    def adopt(self, job: JobId, holders: Iterable[str]) -> None:
        """Record executors that hold a job already."""
        self._holders[job] = frozenset(holders)

    def route(self, order: Order) -> Routed:
        job, before = order.job, self._holders.get(order.job, frozenset())
        self._waiting.pop(job, None)
        if isinstance(order, Release):
            return Routed({} if job in self._leaving else dict.fromkeys(sorted(before) or self._names, order))
        owners = [self._owner(device) for device in order.allocation.devices()]
        now = frozenset([next((owner for owner in owners if owner in before), owners[0])])
        if job in self._leaving or (before and not before & now):
            self._waiting[job] = order
            asked = () if job in self._leaving else tuple(sorted(before))
            self._leaving.setdefault(job, before)
            return Routed({}, asked)
        self._holders[job] = now
        released: dict[str, Order] = {name: Release(job, order.generation) for name in sorted(before - now)}
        return Routed(released | dict.fromkeys(sorted(now), order))

    def on_handed_over(self, name: str, job: JobId) -> Assign | None:
        """Forget a holder. Returns the order that waited for it, if any, and can be sent now."""
        for table in (self._holders, self._leaving):
            if job in table and not (rest := table[job] - {name}):
                del table[job]
            elif job in table:
                table[job] = rest
        return None if job in self._leaving else self._waiting.pop(job, None)

    def on_lost(self, name: str) -> list[Assign]:
        """Forget an executor with all it held. Returns the orders that waited for it."""
        held = [job for job, holders in self._holders.items() if name in holders]
        return [order for job in held if (order := self.on_handed_over(name, job)) is not None]

    def evacuate(self, name: str) -> list[JobId]:
        """The jobs that an executor has to hand over so that it holds none; orders for them wait for that."""
        held = [job for job, holders in self._holders.items() if name in holders and job not in self._leaving]
        self._leaving.update({job: self._holders[job] for job in held})
        return held

    def holds(self, name: str) -> bool:
        """Whether an executor has the state of some job."""
        return any(name in holders for holders in self._holders.values())

    def is_stale(self, name: str, fact: Fact) -> bool:
        """Whether another executor runs the job of a fact by now."""
        holders = self._holders.get(getattr(fact, "job", JobId("")))
        return holders is not None and name not in holders

    def forget(self, job: JobId) -> None:
        for table in (self._holders, self._leaving, self._waiting):
            table.pop(job, None)
