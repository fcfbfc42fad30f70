"""Placing rules against brute force over sets of free devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import UnknownName
from carpool.core.model import Allocation, JobId, JobSpec, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.placement import (
    PLACEMENT_RULES,
    PlacementRule,
    consolidated,
    emptiest,
    linked,
    place,
    placement_rule,
    pooled,
)
from carpool.core.topology import Cluster, Link
from carpool.testing.strategies import clusters, mixed_clusters

V, K = Kind("V100"), Kind("K80")


def free_by_node(cluster: Cluster, taken: set[int], kind: Kind) -> list[list[int]]:
    """The free devices of a kind in each node."""
    return [[d for d in node.devices if d not in taken and cluster.kind_of(d) == kind] for node in cluster.nodes]


def brute_consolidated(cluster: Cluster, taken: set[int], kind: Kind, count: int) -> list[int] | None:
    """⌊g/n⌋ whole free nodes, lowest first, then the fullest node that still fits, lowest on ties."""
    nodes = free_by_node(cluster, taken, kind)
    size = cluster.node_size[kind]
    whole, rest = divmod(count, size) if count > size else (0, count)
    empty = [index for index, free in enumerate(nodes) if len(free) == size][:whole]
    if len(empty) < whole:
        return None
    found = [device for index in empty for device in nodes[index]]
    if rest:
        fitting = [(len(free), i) for i, free in enumerate(nodes) if len(free) >= rest and i not in empty]
        if not fitting:
            return None
        found += nodes[min(fitting)[1]][:rest]
    return sorted(found)


def brute_pooled(cluster: Cluster, taken: set[int], kind: Kind, count: int) -> list[int] | None:
    free = [device for node in free_by_node(cluster, taken, kind) for device in node]
    return free[:count] if len(free) >= count else None


def brute_emptiest(cluster: Cluster, taken: set[int], kind: Kind, count: int) -> list[int] | None:
    nodes = sorted(free_by_node(cluster, taken, kind), key=lambda free: -len(free))
    free = [device for node in nodes for device in node]
    return sorted(free[:count]) if len(free) >= count else None


BRUTE = {"consolidated": brute_consolidated, "pooled": brute_pooled, "emptiest": brute_emptiest}


@pytest.mark.parametrize("name", PLACEMENT_RULES)
@given(cluster=st.one_of(clusters(), mixed_clusters()), data=st.data())
def test_like_brute_force(name: str, cluster: Cluster, data: st.DataObject) -> None:
    taken = data.draw(st.sets(st.integers(0, cluster.num_devices - 1)))
    free = Occupancy(cluster)
    for device in taken:
        free.take(JobSpec(JobId(f"t{device}")), Allocation.of(device))
    kind = data.draw(st.sampled_from(cluster.kinds))
    count = data.draw(st.integers(1, cluster.num_devices))
    runs = placement_rule(name)(free, kind, count)
    found = None if runs is None else [device for run in runs for device in run]
    assert found == BRUTE[name](cluster, taken, kind, count)


@pytest.mark.parametrize(
    ("rule", "runs"),
    [
        (consolidated, (range(6, 8),)),  # the fullest node that fits
        (pooled, (range(1, 3),)),  # the lowest numbers
        (emptiest, (range(1, 3),)),  # the emptiest node
    ],
)
def test_the_rules_differ(rule: PlacementRule, runs: tuple[range, ...]) -> None:
    free = Occupancy(Cluster.build([(2, 4, "V100")]))
    free.take(JobSpec(JobId("a")), Allocation.of(0))
    free.take(JobSpec(JobId("b"), 2), Allocation.of(4, 5))
    assert rule(free, V, 2) == runs


def test_a_gang_takes_whole_nodes_and_best_fit_for_the_rest() -> None:
    free = Occupancy(Cluster.build([(4, 4, "V100")]))
    free.take(JobSpec(JobId("a"), 2), Allocation.of(4, 5))
    assert consolidated(free, V, 10) == (range(4), range(6, 12))
    assert consolidated(free, V, 15) is None, "fifteen need three whole nodes and three devices of a fourth"
    assert pooled(free, V, 14) == (range(4), range(6, 16))


def test_the_first_kind_that_has_them() -> None:
    free = Occupancy(Cluster.build([(1, 2, "V100"), (1, 4, "K80")]))
    assert place(free, (V, K), 2) == (range(2),)
    assert place(free, (V, K), 3) == (range(2, 5),)
    assert place(free, (Kind("H100"), K), 1) == (range(2, 3),), "a kind that is not there is passed over"
    assert place(free, (V,), 3) is None
    assert place(free, (), 1) is None


def test_unknown_rule() -> None:
    with pytest.raises(UnknownName, match=r"unknown placement 'pool'\. Did you mean pooled"):
        placement_rule("pool")


def test_linked_nodes_follow_the_fastest_links() -> None:
    cluster = Cluster.build([(4, 2, "V100")])
    for one, other, speed in (("n0", "n1", 1e7), ("n0", "n3", 1e9), ("n1", "n2", 1e8), ("n2", "n3", 1e7)):
        cluster = cluster.with_link(Link((one, other), speed))
    found = linked(Occupancy(cluster), V, 4)
    assert found[0] == (range(2), range(6, 8)), "from the first node over its fastest link"
    assert (range(2, 6),) in found, "from the second one"
    assert linked(Occupancy(cluster), V, 6, max_nodes=2) == []
    assert all(sum(map(len, runs)) == 5 for runs in linked(Occupancy(cluster), V, 5, max_nodes=3))
