"""Clusters: numbering, look-ups, and what an allocation looks like to a rate model."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.host_resources import HostResources
from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, Kind, NodeId, as_runs
from carpool.core.topology import Bank, Cluster, Link, Neighbour, Node, Placement
from carpool.testing.strategies import mixed_clusters

V, K = Kind("V100"), Kind("K80")
MIXED = Cluster(
    (
        Node(NodeId(0), "a", (Bank(V, range(2), 16), Bank(K, range(2, 3), 8), Bank(V, range(3, 5), 32))),
        Node(NodeId(1), "b", (Bank(V, range(5, 8)),)),
    )
)


def test_figures_of_a_mixed_cluster() -> None:
    assert MIXED.capacity == {V: 7, K: 1}
    assert MIXED.node_size == {V: 4, K: 1}, "two banks of one kind in one node are one node's devices"
    assert MIXED.least_memory == {V: 16, K: 8}
    assert (MIXED.num_devices, MIXED.kinds) == (8, (V, K))


def test_groups_count_by_node_and_kind() -> None:
    assert MIXED.groups_of(Allocation.of(0, 1, 3)) == ((V, 3),)
    assert MIXED.groups_of(Allocation.of(1, 2, 3, 5)) == ((K, 1), (V, 1), (V, 2))


def test_placement_of_unlike_shares_is_as_good_as_the_worst() -> None:
    plain = Allocation.of(5, 6)
    assert MIXED.placement(plain) == Placement(((V, 2),))
    assert MIXED.placement(plain) is MIXED.placement(Allocation.of(6, 7)), "usual placements are made once"
    both = Allocation((*Allocation.of(0, fraction=0.5).shares, *Allocation.of(5, fraction=0.25, turn=2).shares), 32)
    assert MIXED.placement(both) == Placement(((V, 1), (V, 1)), 0.25, 32, turn=2)


def test_a_gang_is_as_crowded_as_its_fullest_device() -> None:
    half = Neighbour(JobSpec(JobId("half")), 0.5)
    gang = Placement(((V, 2),), 0.5)
    assert gang.among([{}, {}]) is gang
    everywhere = gang.among([{JobId("half"): half}, {JobId("half"): half}])
    assert everywhere == Placement(((V, 2),), 0.5, neighbours=(half,))
    apart = gang.among([{JobId("half"): half}, {JobId("other"): Neighbour(JobSpec(JobId("other")), 0.25)}])
    assert (everywhere.load, apart.load, len(apart.neighbours)) == (1.0, 1.0, 2)


@given(mixed_clusters(), st.data())
def test_look_ups_agree(cluster: Cluster, data: st.DataObject) -> None:
    device = data.draw(st.integers(0, cluster.num_devices - 1))
    node, bank = cluster.spot(device)
    assert device in node.devices
    assert device in bank.devices
    assert bank in node.banks
    assert cluster.node_of(device) is node
    assert cluster.kind_of(device) == bank.kind
    assert cluster.device_name(DeviceId(device)) == f"{node.name}:{device - node.devices.start}"


@given(mixed_clusters(), st.data())
def test_groups_hold_every_device_once(cluster: Cluster, data: st.DataObject) -> None:
    devices = data.draw(st.lists(st.integers(0, cluster.num_devices - 1), min_size=1, unique=True))
    naive: dict[tuple[int, Kind], int] = {}
    for device in devices:
        key = (cluster.node_of(device).id, cluster.kind_of(device))
        naive[key] = naive.get(key, 0) + 1
    expected = tuple(sorted((kind, count) for (_, kind), count in naive.items()))
    assert cluster.groups_of(Allocation.of(*devices)) == expected
    assert cluster.placement(Allocation.of(*devices)).groups == expected


def test_joined_adds_one_node_at_the_end() -> None:
    larger = MIXED.joined("c", [("H100", 2, 80), ("K80", 1, 8)])
    assert larger.nodes[:2] == MIXED.nodes
    assert larger.nodes[2].devices == range(8, 11)
    assert larger.capacity == {V: 7, K: 2, Kind("H100"): 2}


def test_wrong_numbers_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="its place is 0"):
        Cluster((Node(NodeId(1), "a", (Bank(V, range(1)),)),))
    with pytest.raises(AssertionError, match="device ids of node 'a' start at 1"):
        Cluster((Node(NodeId(0), "a", (Bank(V, range(1, 2)),)),))


@given(st.sets(st.integers(0, 40)))
def test_runs_are_maximal_and_ascending(devices: set[int]) -> None:
    runs = as_runs(tuple(devices))
    assert [device for run in runs for device in run] == sorted(devices)
    assert all(one.stop < other.start for one, other in pairwise(runs))


def linked(*links: tuple[str, str, float]) -> Cluster:
    cluster = Cluster.build([(4, 2, "V100")])
    for one, other, speed in links:
        cluster = cluster.with_link(Link((one, other), speed, 1e-4))
    return cluster


def test_a_placement_knows_the_slowest_link_between_its_nodes() -> None:
    cluster = linked(("n0", "n1", 1e9), ("n1", "n2", 1e8), ("n0", "n2", 1e9))
    assert cluster.placement(Allocation.of(0, 1)).path is None
    fast, slow = (cluster.placement(Allocation.of(*devices)).path for devices in ((1, 2), (0, 2, 4)))
    assert fast is not None
    assert slow is not None
    assert fast.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert slow.bytes_per_s == pytest.approx(1e8, rel=0.05)
    assert cluster.fastest_path() == fast


def test_an_unmeasured_link_is_as_fast_as_both_ends_are_with_others() -> None:
    cluster = linked(("n0", "n1", 1e9), ("n2", "n1", 1e7))
    between = cluster.link_between(0, 2)
    assert between is not None
    assert between.bytes_per_s == 1e7
    assert cluster.link_between(0, 3) is None
    assert cluster.placement(Allocation.of(0, 6)).path is None


def test_a_link_is_replaced_whichever_end_comes_first() -> None:
    cluster = linked(("n0", "n1", 1e9), ("n1", "n0", 1e6))
    assert [link.bytes_per_s for link in cluster.links] == [1e6]


def test_a_node_that_joins_is_known_or_new_or_takes_the_place_of_another() -> None:
    links = (Link(("n0", "n1"), 1e9), Link(("n1", "n2"), 1e9))
    cluster = replace(Cluster.build([(3, 2, "V100")]), links=links)
    banks = (("V100", 2, 0),)
    assert cluster.with_join("n1", banks) == cluster
    assert cluster.with_join("new", banks) == cluster.joined("new", banks)
    assert cluster.with_join("new", banks, replaces="gone") == cluster.joined("new", banks)
    after = cluster.with_join("new", banks, HostResources(4), replaces="n0")
    assert [(node.name, node.devices) for node in after.nodes] == [
        ("new", range(2)),
        ("n1", range(2, 4)),
        ("n2", range(4, 6)),
    ]
    assert after.nodes[0].resources == HostResources(4)
    assert after.links == links[1:], "links of the other machine say nothing about this one"
