"""Device occupancy: free devices as bit masks, residents per device, cheap forks and overbooking checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from carpool.core.errors import OutOfHostResources, Overbooked, SpansNodes
from carpool.core.host_resources import NO_USAGE, most_devices, resource_shortage
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, Kind, NodeId, Share
from carpool.core.topology import Bank, Cluster, Node

Piece = tuple[Node, Bank, range, int, Share]  # part of a share inside one bank, and its bits in the node's mask

_EPSILON = 1e-9  # fractions are sums of decimal steps


def refuse_overbooking(
    there: Occupancy, spec: JobSpec, allocation: Allocation, pieces: Sequence[Piece], max_virtual: float
) -> None:
    """Raise Overbooked unless an allocation, cut into pieces, fits free devices and the job's limits."""
    count = allocation.num_devices
    if count != spec.devices and not spec.narrowest <= count <= spec.widest:
        raise Overbooked(f"job {spec.id!r} accepts {spec.narrowest} to {spec.widest} devices, not {count}")
    if len(pieces) > 1:
        _refuse_twice(spec, pieces)
        if there.cluster.nodes_for(spec) and max_virtual < inf:  # infinite: it was allowed when recorded
            _refuse_span(there, spec, pieces)
    for node, bank, run, bits, share in pieces:
        if not 0.0 < share.fraction <= 1.0:
            raise Overbooked(f"job {spec.id!r}: a fraction of {share.fraction} is not in (0, 1]")
        if node.id in there.lost:
            raise Overbooked(f"job {spec.id!r}: node {node.name!r} is lost")
        if there.free_mask(node.id) & bits != bits:  # some device has residents, or is used by a foreign process
            if there.foreign_devices and max_virtual < inf:  # infinite: it was allowed when recorded
                _refuse_foreign(there, spec, run)
            _refuse_shared(there, spec, share, bank, run, max_virtual)
        elif 0 < bank.memory_bytes < spec.memory_bytes:
            raise Overbooked(_too_much_memory(spec, run.start, spec.memory_bytes, bank))


def _refuse_twice(spec: JobSpec, pieces: Sequence[Piece]) -> None:
    seen: dict[int, int] = {}
    for node, _, run, bits, _ in pieces:
        if seen.get(node.id, 0) & bits:
            raise Overbooked(f"job {spec.id!r} would hold devices {run.start} to {run.stop - 1} twice")
        seen[node.id] = seen.get(node.id, 0) | bits


def _refuse_span(there: Occupancy, spec: JobSpec, pieces: Sequence[Piece]) -> None:
    names = list(dict.fromkeys(piece[0].name for piece in pieces))
    most = there.cluster.nodes_for(spec)
    if len(names) > most:
        limit = "one node" if most == 1 else f"at most {most} nodes"
        raise SpansNodes(f"job {spec.id!r} would run on {', '.join(names)}; a job runs on {limit}", spec.id)


def _refuse_foreign(there: Occupancy, spec: JobSpec, run: range) -> None:
    foreign = next((device for device in run if there.is_foreign(device)), None)
    if foreign is not None:
        raise OutOfHostResources(f"device {foreign} is in use by a foreign process", spec.id)


def _refuse_shared(there: Occupancy, spec: JobSpec, share: Share, bank: Bank, run: range, max_virtual: float) -> None:
    for device in run:
        residents = there.residents(device)
        if any(resident.job == spec.id for resident in residents):
            raise Overbooked(f"job {spec.id!r} holds device {device} already")
        load = sum(resident.fraction for resident in residents) + share.fraction
        if load > max_virtual + _EPSILON:
            raise Overbooked(
                f"shares of device {device} would sum to {load:.3g} with job {spec.id!r}, limit {max_virtual:.3g}; "
                f"held by: {', '.join(r.job for r in residents)}"
            )
        memory = sum(resident.memory_bytes for resident in residents) + spec.memory_bytes
        if 0 < bank.memory_bytes < memory:
            raise Overbooked(_too_much_memory(spec, device, memory, bank))


def _too_much_memory(spec: JobSpec, device: int, memory: int, bank: Bank) -> str:
    needed, there = memory / (1 << 30), bank.memory_bytes / (1 << 30)
    return f"device {device} would need {needed:.2f} GiB with job {spec.id!r}, it has {there:.2f} GiB"


class Resident(NamedTuple):
    """One job's hold on one device."""

    job: JobId
    fraction: float
    memory_bytes: int


_Residents = tuple[Resident, ...]


class Occupancy:
    """The devices of a cluster and the jobs on them; `fork` makes a private copy to try changes on.

    A node's free devices are one integer (bit i: its i-th device), and for every device type the nodes with exactly c
    free devices are one integer (bit n: node n). So "the fullest node that still fits, lowest number first" takes two
    integer operations at any cluster size, and a fork copies a few dozen integers.
    """

    __slots__ = (
        "_base_free",
        "_base_residents",
        "_free",
        "_nodes_by_free",
        "_num_shared",
        "_residents",
        "cluster",
        "foreign_devices",
        "free_devices",
        "host_usage",
        "lost",
        "pinned_devices",
    )

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free_devices: dict[Kind, int] = dict.fromkeys(cluster.capacity, 0)
        self.lost: frozenset[NodeId] = frozenset()
        self.host_usage = NO_USAGE
        # Devices used by foreign processes: not free unless a job of ours holds them.
        self.foreign_devices: frozenset[int] = frozenset()
        self.pinned_devices: frozenset[int] = frozenset()  # held by jobs that the plan in progress must not touch
        self._num_shared = 0  # devices with more than one resident
        # A fork reads what it has not changed from its base; the root is its own base.
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

    @property
    def num_free(self) -> int:
        return sum(self.free_devices.values())

    @property
    def is_shared(self) -> bool:
        return self._num_shared > 0

    def free_mask(self, node: int) -> int:
        """The free devices of a node as bits, counted from the node's first device."""
        mask = self._free.get(node)
        return self._base_free[node] if mask is None else mask

    def is_free(self, device: int) -> bool:
        node = self.cluster.node_of(device)
        return bool(self.free_mask(node.id) >> (device - node.devices.start) & 1)

    def nodes_by_free(self, kind: Kind) -> dict[int, int]:
        """For each number of free devices of `kind` above zero that some node has: those nodes, as bits."""
        return self._nodes_by_free[kind]

    def residents(self, device: int) -> _Residents:
        found = self._residents.get(device)
        return self._base_residents.get(device, ()) if found is None else found

    def load(self, device: int) -> float:
        return sum([resident.fraction for resident in self.residents(device)])

    def shared_devices(self) -> Iterator[DeviceId]:
        """Devices with residents, ascending."""
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
    def usable_devices(self) -> dict[Kind, int]:
        """Devices of each type on live nodes, without pinned ones and those left to foreign processes."""
        there = dict(self.cluster.capacity)
        for lost in self.lost:
            for bank in self.cluster.nodes[lost].banks:
                there[bank.kind] -= len(bank.devices)
        for device in self.withheld_devices:
            node, bank = self.cluster.spot(device)
            there[bank.kind] -= node.id not in self.lost
        return there

    @property
    def withheld_devices(self) -> frozenset[int]:
        """Devices that no plan can use now: pinned ones, and those left to foreign processes."""
        if not self.foreign_devices:
            return self.pinned_devices
        return self.pinned_devices | {device for device in self.foreign_devices if self.is_foreign(device)}

    def is_foreign(self, device: int) -> bool:
        """Whether a device is left to foreign processes: they use it, and no job holds it."""
        node = self.cluster.node_of(device)
        is_free = self.free_mask(node.id) >> (device - node.devices.start) & 1
        return device in self.foreign_devices and not is_free and not self.residents(device)

    def fork(self) -> Occupancy:
        """A private copy; its cost grows with the changes made in it, not with the cluster."""
        assert self._base_free is self._free, "a fork is not forked again"
        copy = self._overlaid()
        copy._free = {}
        copy._residents = {}
        return copy

    def within_resources(self, spec: JobSpec) -> Occupancy:
        """A copy, for searching only, with at most as many devices free on a node as its host resources suffice for.

        Host resources that the job itself holds count as free.
        """
        copy = self._overlaid()
        copy._free = {} if self._free is self._base_free else self._free.copy()
        copy._residents = self._residents
        for node in self.cluster.nodes:
            most = self.most_for(spec, node)
            if most is not None and self.free_mask(node.id):
                copy._limit_free(node, most)
        return copy

    def most_for(self, spec: JobSpec, node: Node) -> int | None:
        """For how many devices of a node the host resources left by other jobs suffice; None: for all."""
        there, taken = node.resources, self.host_usage.taken(node.id, but=spec.id)
        if resource_shortage(there, taken, spec.resources_for(0)):
            return 0
        return most_devices(there, taken, spec.resources_for(1)._replace(disk_bytes=0))

    def _overlaid(self) -> Occupancy:
        copy = object.__new__(Occupancy)
        copy.cluster = self.cluster
        copy.free_devices = self.free_devices.copy()
        copy.lost = self.lost
        copy.host_usage = self.host_usage
        copy.foreign_devices = self.foreign_devices
        copy.pinned_devices = self.pinned_devices
        copy._num_shared = self._num_shared
        copy._base_free = self._base_free
        copy._base_residents = self._base_residents
        copy._nodes_by_free = {kind: counts.copy() for kind, counts in self._nodes_by_free.items()}
        return copy

    def take(self, spec: JobSpec, allocation: Allocation, max_virtual: float = 1.0) -> None:
        """Assign an allocation; raises Overbooked, with nothing changed, when it does not fit."""
        if self._take_whole(spec, allocation):
            return
        pieces = self._pieces(allocation)
        refuse_overbooking(self, spec, allocation, pieces, max_virtual)
        if spec.needs_host_resources:
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
        """Fast path: free whole devices of one node, as many as asked for; False in any other case."""
        if len(allocation.shares) != 1:
            return False
        share = allocation.shares[0]
        run = share.devices
        if share.fraction != 1.0 or len(run) != spec.devices or spec.memory_bytes:
            return False
        if spec.cpus or spec.ram_bytes or spec.disk_bytes:  # `needs_host_resources`, inlined: hot
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
        pieces = self._pieces(allocation)
        if self.host_usage is not NO_USAGE:
            for node, _, _, _, _ in pieces:
                self.host_usage = self.host_usage.giving(node.id, job)
        for node, bank, run, bits, _ in pieces:
            if not self._num_shared:  # no device is shared
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
        if self.foreign_devices:
            self._hide_foreign()

    def absorb(self, fork: Occupancy) -> None:
        assert fork._base_free is self._free, "only a fork of this very map can be absorbed"
        self.free_devices = fork.free_devices
        self.host_usage = fork.host_usage
        self._num_shared = fork._num_shared
        self._nodes_by_free = fork._nodes_by_free
        self._free.update(fork._free)
        if all(fork._residents.values()):
            self._residents.update(fork._residents)
            return
        for device, residents in fork._residents.items():
            self._put_residents(device, residents)
        self._hide_foreign()

    def lose(self, node: Node) -> None:
        """Take a node out of use; its residents must have been given back before."""
        self.lost |= {node.id}
        for bank in node.banks:
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask & ~_bits(node, bank.devices))

    def regain(self, node: Node) -> None:
        self.lost -= {node.id}
        for bank in node.banks:
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask | _bits(node, bank.devices))
        self._hide_foreign()

    def set_foreign(self, foreign_devices: frozenset[int]) -> None:
        """Place no more jobs on exactly these devices, which foreign processes use; jobs that hold one keep it."""
        back = [device for device in self.foreign_devices - foreign_devices if self.is_foreign(device)]
        self.foreign_devices = foreign_devices
        for device in back:
            node, bank = self.cluster.spot(device)
            if node.id not in self.lost:
                mask = self.free_mask(node.id)
                self._recount(node, bank, mask, mask | _bits(node, range(device, device + 1)))
        self._hide_foreign()

    def _hide_foreign(self) -> None:
        """Mark foreign devices as not free, except in a fork: there a job may replace another on them."""
        if self._free is not self._base_free:
            return
        for device in self.foreign_devices:
            node, bank = self.cluster.spot(device)
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask & ~_bits(node, range(device, device + 1)))

    def join(self, cluster: Cluster) -> None:
        """Continue with a cluster that has one more node at its end."""
        node = cluster.nodes[-1]
        self.cluster = cluster
        self._free[node.id] = 0
        for bank in node.banks:
            self.free_devices.setdefault(bank.kind, 0)
            self._nodes_by_free.setdefault(bank.kind, {})
            mask = self.free_mask(node.id)
            self._recount(node, bank, mask, mask | _bits(node, bank.devices))

    def _host(self, spec: JobSpec, pieces: Sequence[Piece], *, is_checked: bool) -> None:
        """Reserve a job's host resources; OutOfHostResources, with nothing changed, where a node lacks them."""
        counts: dict[NodeId, int] = {}
        for node, _, run, _, _ in pieces:
            counts[node.id] = counts.get(node.id, 0) + len(run)
        for number, count in counts.items() if is_checked else ():
            node = self.cluster.nodes[number]
            short = resource_shortage(node.resources, self.host_usage.taken(number), spec.resources_for(count))
            if short:
                raise OutOfHostResources(f"node {node.name!r} has {short} for job {spec.id!r}", spec.id)
        for number, count in counts.items():
            self.host_usage = self.host_usage.taking(number, spec.id, spec.resources_for(count))

    def _limit_free(self, node: Node, most: int) -> None:
        """Leave only the `most` lowest free devices of each type on a node free."""
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
                raise Overbooked(
                    f"devices {first} to {stop - 1} are not in the cluster, which has {cluster.num_devices}"
                )
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
