"""Device occupancy: free devices as bit masks, residents per device, cheap forks and overbooking checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from carpool.core.errors import OutOfHostResources, Overbooked
from carpool.core.host_resources import NO_USAGE, most_devices, resource_shortage
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, Kind, NodeId, Share
from carpool.core.topology import Bank, Cluster, Node

Piece = tuple[Node, Bank, range, int, Share]  # part of a share inside one bank, and its bits in the node's mask

_EPSILON = 1e-9  # fractions are sums of decimal steps


def refuse_overbooking(
    there: Occupancy, spec: JobSpec, allocation: Allocation, pieces: Sequence[Piece], max_virtual: float
) -> None:
    """Overbooked unless an allocation, cut into pieces, fits what is left and what the job accepts."""
    count = allocation.num_devices
    if count != spec.devices and not spec.narrowest <= count <= spec.widest:
        raise Overbooked(f"job {spec.id!r} takes {spec.narrowest} to {spec.widest} devices, not {count}")
    if len(pieces) > 1:
        _refuse_twice(spec, pieces)
    for node, bank, run, bits, share in pieces:
        if not 0.0 < share.fraction <= 1.0:
            raise Overbooked(f"job {spec.id!r}: a fraction of {share.fraction} is not in (0, 1]")
        if node.id in there.lost:
            raise Overbooked(f"job {spec.id!r}: node {node.name!r} is lost")
        if there.free_mask(node.id) & bits != bits:  # some device has residents already, or is left to others
            if there.yielded and max_virtual < inf:  # what was allowed then is allowed
                _refuse_left(there, spec, run)
            _refuse_shared(there, spec, share, bank, run, max_virtual)
        elif 0 < bank.memory_bytes < spec.memory_bytes:
            raise Overbooked(_too_much_memory(spec, run.start, spec.memory_bytes, bank))


def _refuse_twice(spec: JobSpec, pieces: Sequence[Piece]) -> None:
    seen: dict[int, int] = {}
    for node, _, run, bits, _ in pieces:
        if seen.get(node.id, 0) & bits:
            raise Overbooked(f"job {spec.id!r} would hold devices {run.start} to {run.stop - 1} twice")
        seen[node.id] = seen.get(node.id, 0) | bits


def _refuse_left(there: Occupancy, spec: JobSpec, run: range) -> None:
    left = next((device for device in run if there.is_left(device)), None)
    if left is not None:
        raise OutOfHostResources(f"device {left} is left to others, who compute on it", spec.id)


def _refuse_shared(there: Occupancy, spec: JobSpec, share: Share, bank: Bank, run: range, max_virtual: float) -> None:
    for device in run:
        residents = there.residents(device)
        if any(resident.job == spec.id for resident in residents):
            raise Overbooked(f"job {spec.id!r} holds device {device} already")
        load = sum(resident.fraction for resident in residents) + share.fraction
        if load > max_virtual + _EPSILON:
            raise Overbooked(
                f"device {device} would carry {load:.3g} of at most {max_virtual:.3g} with job {spec.id!r}; "
                f"there already: {', '.join(r.job for r in residents)}"
            )
        memory = sum(resident.memory_bytes for resident in residents) + spec.memory_bytes
        if 0 < bank.memory_bytes < memory:
            raise Overbooked(_too_much_memory(spec, device, memory, bank))


def _too_much_memory(spec: JobSpec, device: int, memory: int, bank: Bank) -> str:
    needed, there = memory / (1 << 30), bank.memory_bytes / (1 << 30)
    return f"device {device} would hold {needed:.2f} GiB of its {there:.2f} GiB with job {spec.id!r}"


# A node's free devices are one integer (bit i = i-th device of the node), and for every kind the nodes with exactly c
# free devices are one integer as well (bit n = node n). "The fullest node that still fits, lowest number first" is then
# two integer operations at any cluster size, and a fork for a draft is a copy of a few dozen integers.


class Resident(NamedTuple):
    """One job's hold on one device."""

    job: JobId
    fraction: float
    memory_bytes: int


_Residents = tuple[Resident, ...]


class Occupancy:
    """The devices of a cluster and what is taken of them. `fork` gives a private copy for trying things out."""

    __slots__ = (
        "_base_free",
        "_base_residents",
        "_free",
        "_nodes_by_free",
        "_num_shared",
        "_residents",
        "cluster",
        "free_devices",
        "hosting",
        "lost",
        "yielded",
    )

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free_devices: dict[Kind, int] = dict.fromkeys(cluster.capacity, 0)
        self.lost: frozenset[NodeId] = frozenset()
        self.hosting = NO_USAGE
        self.yielded: frozenset[int] = frozenset()  # devices that others compute on: not free once nobody of ours is
        self._num_shared = 0  # devices with more than one resident
        # What a fork has not touched is read from the base; the root is its own base.
        self._free: dict[int, int] = {}
        self._residents: dict[int, _Residents] = {}
        self._base_free = self._free
        self._base_residents = self._residents
        self._nodes_by_free: dict[Kind, dict[int, int]] = {kind: {} for kind in cluster.capacity}
        for node in cluster.nodes:
            self._free[node.id] = 0
            for bank in node.banks:
                mask = self._free[node.id]
                self._recount(node, bank, mask, mask | _bits(node, bank.devices))

    # ---------------------------------------------------------------------------------------------------- asking
    @property
    def num_free(self) -> int:
        """Free devices of all kinds."""
        return sum(self.free_devices.values())

    @property
    def is_shared(self) -> bool:
        """Whether any device has more than one resident."""
        return self._num_shared > 0

    def free_mask(self, node: int) -> int:
        """The free devices of a node as bits, counted from the node's first device."""
        mask = self._free.get(node)
        return self._base_free[node] if mask is None else mask

    def nodes_by_free(self, kind: Kind) -> dict[int, int]:
        """For each number of free devices of `kind` above zero that some node has: those nodes, as bits."""
        return self._nodes_by_free[kind]

    def residents(self, device: int) -> _Residents:
        """The jobs that hold a share of a device."""
        found = self._residents.get(device)
        return self._base_residents.get(device, ()) if found is None else found

    def load(self, device: int) -> float:
        """Sum of the fractions held on a device."""
        return sum([resident.fraction for resident in self.residents(device)])

    def shared_devices(self) -> Iterator[DeviceId]:
        """Devices somebody holds a share of, ascending."""
        held = {device for device, jobs in self._residents.items() if jobs}
        if self._base_residents is not self._residents:
            held |= {d for d, jobs in self._base_residents.items() if jobs and d not in self._residents}
        return iter(sorted(map(DeviceId, held)))

    def jobs_on(self, node: Node) -> list[JobId]:
        """Jobs that hold something on a node, each once, in order of device."""
        seen: dict[JobId, None] = {}
        for device in node.devices:
            for resident in self.residents(device):
                seen[resident.job] = None
        return list(seen)

    @property
    def there(self) -> dict[Kind, int]:
        """Devices of each kind that are to be had at all: on nodes that are not lost, and not left to others."""
        there = dict(self.cluster.capacity)
        for lost in self.lost:
            for bank in self.cluster.nodes[lost].banks:
                there[bank.kind] -= len(bank.devices)
        for device in self.yielded:
            node, bank = self.cluster.spot(device)
            there[bank.kind] -= node.id not in self.lost and self.is_left(device)
        return there

    def is_left(self, device: int) -> bool:
        """Whether a device is left to others: they compute on it, and nobody of ours does."""
        node = self.cluster.node_of(device)
        is_free = self.free_mask(node.id) >> (device - node.devices.start) & 1
        return device in self.yielded and not is_free and not self.residents(device)

    # -------------------------------------------------------------------------------------------------- changing
    def fork(self) -> Occupancy:
        """A private copy; cost follows what is changed in it, not the cluster."""
        assert self._base_free is self._free, "a fork is not forked again"
        copy = self._overlaid()
        copy._free = {}
        copy._residents = {}
        return copy

    def offered(self, spec: JobSpec) -> Occupancy:
        """As a job finds it: with no more free devices on a node than there are supplies for. Nothing is to be taken.

        Where it holds something already, it would give that back first.
        """
        copy = self._overlaid()
        copy._free = {} if self._free is self._base_free else self._free.copy()
        copy._residents = self._residents
        for node in self.cluster.nodes:
            most = self.most_for(spec, node)
            if most is not None and self.free_mask(node.id):
                copy._leave(node, most)
        return copy

    def most_for(self, spec: JobSpec, node: Node) -> int | None:
        """How many of a node's devices a job has supplies for beside all others; None: for all of them."""
        there, taken = node.supplies, self.hosting.taken(node.id, but=spec.id)
        if resource_shortage(there, taken, spec.supplies_for(0)):
            return 0
        return most_devices(there, taken, spec.supplies_for(1)._replace(disk_bytes=0))

    def _overlaid(self) -> Occupancy:
        copy = object.__new__(Occupancy)
        copy.cluster = self.cluster
        copy.free_devices = self.free_devices.copy()
        copy.lost = self.lost
        copy.hosting = self.hosting
        copy.yielded = self.yielded
        copy._num_shared = self._num_shared
        copy._base_free = self._base_free
        copy._base_residents = self._base_residents
        copy._nodes_by_free = {kind: counts.copy() for kind, counts in self._nodes_by_free.items()}
        return copy

    def take(self, spec: JobSpec, allocation: Allocation, max_virtual: float = 1.0) -> None:
        """Let a job hold an allocation; Overbooked, with nothing changed, when it cannot."""
        if self._take_whole(spec, allocation):
            return
        pieces = self._pieces(allocation)
        refuse_overbooking(self, spec, allocation, pieces, max_virtual)
        if spec.asks_supplies:
            self._host(spec, pieces, is_checked=max_virtual < inf)
        residents = self._residents
        for node, bank, run, bits, share in pieces:
            resident = Resident(spec.id, share.fraction, spec.memory_bytes)
            mask = self.free_mask(node.id)
            if mask & bits:
                self._recount(node, bank, mask, mask & ~bits)
            if mask & bits == bits:
                residents.update(dict.fromkeys(run, (resident,)))
            else:
                for device in run:
                    beside = self.residents(device)
                    self._num_shared += len(beside) == 1
                    residents[device] = (*beside, resident)

    def _take_whole(self, spec: JobSpec, allocation: Allocation) -> bool:
        """The usual case, quickly: free devices of one node, whole and as many as asked for; False for any other."""
        if len(allocation.shares) != 1:
            return False
        share = allocation.shares[0]
        run = share.devices
        if share.fraction != 1.0 or len(run) != spec.devices or spec.memory_bytes:
            return False
        if spec.cpus or spec.ram_bytes or spec.disk_bytes:  # `asks_supplies`, where a call is felt
            return False
        if not 0 <= run.start < run.stop <= self.cluster.num_devices:
            return False
        node, bank = self.cluster.spot(run.start)
        bits = ((1 << len(run)) - 1) << (run.start - node.devices.start)
        mask = self.free_mask(node.id)
        if run.stop > bank.devices.stop or mask & bits != bits:  # nothing is free on a lost node
            return False
        self._recount(node, bank, mask, mask ^ bits)
        self._residents.update(dict.fromkeys(run, (Resident(spec.id, 1.0, 0),)))
        return True

    def give(self, job: JobId, allocation: Allocation) -> None:
        """Take a job's allocation back."""
        pieces = self._pieces(allocation)
        if self.hosting is not NO_USAGE:
            for node, _, _, _, _ in pieces:
                self.hosting = self.hosting.giving(node.id, job)
        for node, bank, run, bits, _ in pieces:
            if not self._num_shared:  # nobody else is on any device
                for device in run:
                    self._put_residents(device, ())
                if node.id not in self.lost:
                    mask = self.free_mask(node.id)
                    self._recount(node, bank, mask, mask | bits)
                continue
            emptied = bits
            for device in run:
                residents = self.residents(device)
                if len(residents) == 1:
                    self._put_residents(device, ())
                    continue
                stay = tuple([resident for resident in residents if resident.job != job])
                self._num_shared -= len(stay) == 1
                self._put_residents(device, stay)
                emptied &= ~(1 << (device - node.devices.start))
            if emptied and node.id not in self.lost:
                mask = self.free_mask(node.id)
                self._recount(node, bank, mask, mask | emptied)
        if self.yielded:
            self._leave_to_others()

    def absorb(self, fork: Occupancy) -> None:
        """Become what a fork of this has become."""
        assert fork._base_free is self._free, "only a fork of this very map can be absorbed"
        self.free_devices = fork.free_devices
        self.hosting = fork.hosting
        self._num_shared = fork._num_shared
        self._nodes_by_free = fork._nodes_by_free
        self._free.update(fork._free)
        if all(fork._residents.values()):
            self._residents.update(fork._residents)
            return
        for device, residents in fork._residents.items():
            self._put_residents(device, residents)
        self._leave_to_others()

    def lose(self, node: Node) -> None:
        """Take a node out of use; its residents must have been given back before."""
        self.lost |= {node.id}
        for bank in node.banks:
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask & ~_bits(node, bank.devices))

    def regain(self, node: Node) -> None:
        """Put a lost node back into use, all free."""
        self.lost -= {node.id}
        for bank in node.banks:
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask | _bits(node, bank.devices))
        self._leave_to_others()

    def leave(self, yielded: frozenset[int]) -> None:
        """Leave these devices to others, as soon as nobody of ours is there; others are ours again."""
        back = [device for device in self.yielded - yielded if self.is_left(device)]
        self.yielded = yielded
        for device in back:
            node, bank = self.cluster.spot(device)
            if node.id not in self.lost:
                mask = self.free_mask(node.id)
                self._recount(node, bank, mask, mask | _bits(node, range(device, device + 1)))
        self._leave_to_others()

    def _leave_to_others(self) -> None:
        """Devices that others compute on are not free at rest; within a draft a job may take another's place there."""
        if self._free is not self._base_free:
            return
        for device in self.yielded:
            node, bank = self.cluster.spot(device)
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask & ~_bits(node, range(device, device + 1)))

    def join(self, cluster: Cluster) -> None:
        """Go on with a cluster that has one more node at its end."""
        node = cluster.nodes[-1]
        self.cluster = cluster
        self._free[node.id] = 0
        for bank in node.banks:
            self.free_devices.setdefault(bank.kind, 0)
            self._nodes_by_free.setdefault(bank.kind, {})
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask | _bits(node, bank.devices))

    # --------------------------------------------------------------------------------------------------- inside
    def _host(self, spec: JobSpec, pieces: Sequence[Piece], *, is_checked: bool) -> None:
        """Let a job have the supplies it asks for; OutOfSupplies, with nothing changed, where a node has not enough."""
        counts: dict[NodeId, int] = {}
        for node, _, run, _, _ in pieces:
            counts[node.id] = counts.get(node.id, 0) + len(run)
        for number, count in counts.items() if is_checked else ():
            node = self.cluster.nodes[number]
            short = resource_shortage(node.supplies, self.hosting.taken(number), spec.supplies_for(count))
            if short:
                raise OutOfHostResources(f"node {node.name!r} has {short} for job {spec.id!r}", spec.id)
        for number, count in counts.items():
            self.hosting = self.hosting.taking(number, spec.id, spec.supplies_for(count))

    def _leave(self, node: Node, most: int) -> None:
        """Let a node have so many free devices of each kind at most, the lowest."""
        for bank in {bank.kind: bank for bank in node.banks}.values():
            mask = self.free_mask(node.id)
            excess = mask & sum(_bits(node, other.devices) for other in node.banks if other.kind == bank.kind)
            for _ in range(min(most, excess.bit_count())):
                excess &= excess - 1  # without its lowest device
            self._recount(node, bank, mask, mask & ~excess)

    def _pieces(self, allocation: Allocation) -> list[Piece]:
        """The allocation's devices cut at the borders of nodes and banks."""
        cluster = self.cluster
        pieces: list[Piece] = []
        for share in allocation.shares:
            first, stop = share.devices.start, share.devices.stop
            if first < 0 or stop > cluster.num_devices:
                raise Overbooked(f"devices {first} to {stop - 1} are not all among the {cluster.num_devices} there are")
            while first < stop:
                node, bank = cluster.spot(first)
                end = bank.devices.stop if bank.devices.stop < stop else stop
                bits = ((1 << (end - first)) - 1) << (first - node.devices.start)
                pieces.append((node, bank, range(first, end), bits, share))
                first = end
        return pieces

    def _recount(self, node: Node, bank: Bank, old: int, mask: int) -> None:
        """Store a node's new free mask and move the node between the counts of one bank's kind."""
        self._free[node.id] = mask
        if len(node.banks) == 1:
            before, after = old.bit_count(), mask.bit_count()
        else:
            bits = sum(_bits(node, other.devices) for other in node.banks if other.kind == bank.kind)
            before, after = (old & bits).bit_count(), (mask & bits).bit_count()
        if before == after:
            return
        self.free_devices[bank.kind] += after - before
        counts = self._nodes_by_free[bank.kind]
        bit = 1 << node.id
        if before:
            nodes = counts[before] ^ bit
            if nodes:
                counts[before] = nodes
            else:
                del counts[before]
        if after:
            counts[after] = counts.get(after, 0) | bit

    def _put_residents(self, device: int, residents: _Residents) -> None:
        if residents or self._residents is not self._base_residents:
            self._residents[device] = residents
        else:
            self._residents.pop(device, None)


def _bits(node: Node, run: range) -> int:
    """A run of a node's devices as bits counted from the node's first device."""
    return ((1 << len(run)) - 1) << (run.start - node.devices.start)
