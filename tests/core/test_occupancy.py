"""The device map against a naive model: one set of holders for each device."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.core.errors import Overbooked
from carpool.core.model import Allocation, JobId, JobSpec, Kind, NodeId, Share
from carpool.core.occupancy import Occupancy
from carpool.core.topology import Bank, Cluster, Node
from carpool.testing.rig import check_occupancy
from carpool.testing.strategies import GIB, mixed_clusters

Holders = dict[int, dict[JobId, tuple[float, int]]]  # device -> job -> (fraction, memory)


class NaiveMap:
    """Holders of each device, checked device by device."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.holders: Holders = {}
        self.lost: set[int] = set()

    def copy(self) -> "NaiveMap":
        other = NaiveMap(self.cluster)
        other.holders = {device: dict(held) for device, held in self.holders.items()}
        other.lost = set(self.lost)
        return other

    def fits(self, spec: JobSpec, allocation: Allocation, max_virtual: float) -> bool:
        wanted = [(device, share.fraction) for share in allocation.shares for device in share.devices]
        if len({device for device, _ in wanted}) != len(wanted):
            return False
        if not spec.narrowest <= len(wanted) <= spec.widest:
            return False
        return all(self._fits(spec, device, fraction, max_virtual) for device, fraction in wanted)

    def _fits(self, spec: JobSpec, device: int, fraction: float, max_virtual: float) -> bool:
        if not 0 <= device < self.cluster.num_devices or not 0 < fraction <= 1:
            return False
        held = self.holders.get(device, {})
        memory = sum(memory for _, memory in held.values()) + spec.memory_bytes
        room = self.cluster.bank_of(device).memory_bytes
        return (
            self.cluster.node_of(device).id not in self.lost
            and spec.id not in held
            and (not held or sum(part for part, _ in held.values()) + fraction <= max_virtual + 1e-9)
            and (not room or memory <= room)
        )

    def take(self, spec: JobSpec, allocation: Allocation) -> None:
        for share in allocation.shares:
            for device in share.devices:
                self.holders.setdefault(device, {})[spec.id] = (share.fraction, spec.memory_bytes)

    def give(self, job: JobId) -> None:
        for held in self.holders.values():
            held.pop(job, None)

    def fractions(self) -> dict[int, dict[JobId, float]]:
        return {d: {job: part for job, (part, _) in held.items()} for d, held in self.holders.items() if held}


class DeviceMap(RuleBasedStateMachine):
    """Take, give, lose, regain, join, fork and absorb in any order."""

    @initialize(cluster=mixed_clusters(), max_virtual=st.sampled_from((1.0, 1.5, 3.0)))
    def start(self, cluster: Cluster, max_virtual: float) -> None:
        self.root = Occupancy(cluster)
        self.naive = NaiveMap(cluster)
        self.held: dict[JobId, tuple[JobSpec, Allocation]] = {}
        self.max_virtual = max_virtual
        self.num_jobs = 0
        self.fork: Occupancy | None = None
        self.before: tuple[NaiveMap, dict[JobId, tuple[JobSpec, Allocation]]] | None = None

    @property
    def map(self) -> Occupancy:
        return self.root if self.fork is None else self.fork

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        cluster = self.root.cluster
        devices = data.draw(st.lists(st.integers(0, cluster.num_devices - 1), min_size=1, max_size=6, unique=True))
        fraction = data.draw(st.sampled_from((1.0, 1.0, 0.5, 0.3, 0.0, 1.2)))
        allocation = Allocation.of(*devices, fraction=fraction)
        if len(devices) > 1 and data.draw(st.integers(0, 4)) == 0:  # a device twice
            allocation = Allocation((*allocation.shares, Share(range(devices[0], devices[0] + 1), fraction)))
        memory = data.draw(st.sampled_from((0, 0, 5 * GIB, 12 * GIB)))
        width = data.draw(st.integers(1, 6))
        spec = JobSpec(JobId(f"j{self.num_jobs}"), width, min_devices=1, max_devices=6, memory_bytes=memory)
        self.num_jobs += 1
        if self.naive.fits(spec, allocation, self.max_virtual):
            self.map.take(spec, allocation, self.max_virtual)
            self.naive.take(spec, allocation)
            self.held[spec.id] = (spec, allocation)
        else:
            with pytest.raises(Overbooked):
                self.map.take(spec, allocation, self.max_virtual)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take_twice(self, data: st.DataObject) -> None:
        spec, allocation = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        with pytest.raises(Overbooked):
            self.map.take(spec, allocation, 10.0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.held)))
        self.map.give(job, self.held.pop(job)[1])
        self.naive.give(job)

    @precondition(lambda self: self.fork is None)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.root.cluster.nodes))
        for job in self.root.jobs_on(node):
            self.root.give(job, self.held.pop(job)[1])
            self.naive.give(job)
        if node.id not in self.root.lost:
            self.root.lose(node)
            self.naive.lost.add(node.id)

    @precondition(lambda self: self.fork is None and self.naive.lost)
    @rule(data=st.data())
    def regain(self, data: st.DataObject) -> None:
        node = self.root.cluster.nodes[data.draw(st.sampled_from(sorted(self.naive.lost)))]
        self.root.regain(node)
        self.naive.lost.discard(node.id)

    @precondition(lambda self: self.fork is None and len(self.root.cluster.nodes) < 6)
    @rule(kinds=st.lists(st.sampled_from(("V100", "H100")), min_size=1, max_size=2))
    def join(self, kinds: list[str]) -> None:
        larger = self.root.cluster.joined(f"n{len(self.root.cluster.nodes)}", [(kind, 2, 0) for kind in kinds])
        self.root.join(larger)
        self.naive.cluster = larger

    @precondition(lambda self: self.fork is None)
    @rule()
    def begin(self) -> None:
        self.fork = self.root.fork()
        self.before = (self.naive.copy(), dict(self.held))

    @precondition(lambda self: self.fork is not None)
    @rule(keep=st.booleans())
    def end(self, keep: bool) -> None:
        assert self.fork is not None
        assert self.before is not None
        check_occupancy(self.root, self.before[0].fractions(), self.max_virtual)  # a fork leaves its base alone
        if keep:
            self.root.absorb(self.fork)
        else:
            self.naive, self.held = self.before
        self.fork = None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "root"):
            return
        held = self.naive.fractions()
        check_occupancy(self.map, held, self.max_virtual)
        assert list(self.map.shared_devices()) == sorted(held)
        assert self.map.num_free == sum(self.map.free_devices.values())
        for device, fractions in held.items():
            assert self.map.load(device) == pytest.approx(sum(fractions.values()))


TestDeviceMap = DeviceMap.TestCase
TestDeviceMap.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_overbooking_names_value_and_limit() -> None:
    cluster = Cluster((Node(NodeId(0), "a", (Bank(Kind("V100"), range(4), 16 * GIB),)),))
    free = Occupancy(cluster)
    one = JobSpec(JobId("one"), 2, memory_bytes=10 * GIB)
    free.take(one, Allocation.of(0, 1, fraction=0.5))
    two = JobSpec(JobId("two"), 1, memory_bytes=10 * GIB)
    for wanted, words in {
        Allocation.of(0, fraction=0.6): ("sum to 1.1", "limit 1;", "one"),
        Allocation.of(0, fraction=0.5): ("20.00 GiB", "16.00 GiB"),
        Allocation.of(2, 3): ("1 to 1 devices", "not 2"),
        Allocation.of(2, fraction=1.5): ("1.5", "(0, 1]"),
        Allocation.of(4): ("4 to 4", "has 4"),
        Allocation(()): ("not 0",),
    }.items():
        with pytest.raises(Overbooked) as refused:
            free.take(two, wanted)
        assert all(word in str(refused.value) for word in words), refused.value
    twice = Allocation((Share(range(2, 4)), Share(range(3, 4))))
    with pytest.raises(Overbooked, match="job 'wide' would hold devices 3 to 3 twice"):
        free.take(JobSpec(JobId("wide"), 3), twice)
    free.give(one.id, Allocation.of(0, 1, fraction=0.5))
    free.lose(cluster.nodes[0])
    with pytest.raises(Overbooked, match="node 'a' is lost"):
        free.take(two, Allocation.of(0))


def test_only_its_own_fork_is_absorbed() -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    with pytest.raises(AssertionError, match="only a fork of this very map"):
        Occupancy(cluster).absorb(Occupancy(cluster).fork())
    with pytest.raises(AssertionError, match="a fork is not forked again"):
        Occupancy(cluster).fork().fork()


def test_float_steps_fill_a_device() -> None:
    free = Occupancy(Cluster.build([(1, 1, "V100")]))
    for index in range(10):
        free.take(JobSpec(JobId(str(index))), Allocation.of(0, fraction=0.1))
    with pytest.raises(Overbooked):
        free.take(JobSpec(JobId("more")), Allocation.of(0, fraction=0.1))
