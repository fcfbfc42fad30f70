"""Graph split: linear prefixes of graphs, and cutting them through a fake driver."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.compat import cuda_driver, graph_split
from carpool.runtime.compat.graph_split import Edge, is_branched, linear_prefix, split_at_fork


@given(st.permutations(range(6)), st.permutations(range(5)))
def test_a_chain_is_its_own_prefix_in_whatever_order_it_is_listed(nodes: list[int], order: list[int]) -> None:
    edges = list(itertools.pairwise(nodes))
    assert linear_prefix(sorted(nodes), [edges[place] for place in order]) == nodes
    assert linear_prefix(nodes, edges[1:]) == [], "there are two first nodes"


@pytest.mark.parametrize(
    ("edges", "first"),
    [
        ([(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)], [0, 1]),  # a fork and a join
        ([(0, 1), (1, 2), (2, 3), (2, 4)], [0, 1, 2]),  # a fork alone
        ([(0, 2), (1, 2), (2, 3), (3, 4)], []),  # two first nodes
        ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], [0]),  # a bypass
        ([(0, 1), (2, 3), (3, 4)], []),  # two chains
    ],
)
def test_the_prefix_ends_with_the_first_node_that_forks(edges: list[Edge], first: list[int]) -> None:
    assert linear_prefix(range(5), edges) == first


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda edge: edge[0] < edge[1])))
def test_the_rest_depends_on_the_end_of_the_prefix_alone(edges: set[Edge]) -> None:
    first = linear_prefix(range(8), sorted(edges))
    assert set(itertools.pairwise(first)) <= edges
    behind = {start for start, end in edges if start in first and end not in first}
    assert behind <= set(first[-1:])
    assert not [edge for edge in edges if edge[0] not in first and edge[1] in first]


def test_one_node_and_no_nodes_are_chains() -> None:
    assert linear_prefix([3], []) == [3]
    assert linear_prefix([], []) == []


def test_without_a_driver_no_graph_is_branched_and_none_is_cut() -> None:
    assert not is_branched(0)
    assert split_at_fork(0) is None


class Driver:
    """The graph functions of libcuda, with numbers as handles."""

    def __init__(self, refuses: str = "") -> None:
        self.graphs: dict[int, tuple[list[int], list[Edge]]] = {}
        self.ready: dict[int, tuple[list[int], list[Edge]]] = {}
        self.launched: list[tuple[int, int]] = []
        self._refuses = refuses

    def add(self, handle: int, nodes: list[int], edges: list[Edge]) -> None:
        self.graphs[handle] = nodes, edges

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        found = self.graphs[graph.value][0]
        if nodes is not None:
            nodes[:] = found
        count._obj.value = len(found)
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, starts: Any, ends: Any, data: Any, count: Any) -> int:  # noqa: N802
        found = self.graphs[graph.value][1]
        if starts is not None:
            starts[:], ends[:] = ([edge[side] for edge in found] for side in (0, 1))
            assert len(data) == 8 * len(found)
        count._obj.value = len(found)
        return 0

    def cuGraphClone(self, clone: Any, graph: Any) -> int:  # noqa: N802
        nodes, edges = self.graphs[graph.value]
        clone._obj.value = graph.value + 1
        self.add(graph.value + 1, [100 + node for node in nodes], [(100 + start, 100 + end) for start, end in edges])
        return 0

    def cuGraphNodeFindInClone(self, found: Any, node: Any, clone: Any) -> int:  # noqa: N802
        found._obj.value = 100 + node.value
        return 0 if 100 + node.value in self.graphs[clone.value][0] else 1

    def cuGraphDestroyNode(self, node: Any) -> int:  # noqa: N802
        for handle, (nodes, edges) in self.graphs.items():
            kept = [other for other in nodes if other != node.value]
            self.graphs[handle] = kept, [edge for edge in edges if node.value not in edge]
        return 0

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        if self._refuses == "instantiate":
            return 801
        ready._obj.value = 7
        self.ready[7] = self.graphs[graph.value]
        return int(flags.value)

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        del self.graphs[graph.value]
        return 0

    def cuGraphExecDestroy(self, ready: Any) -> int:  # noqa: N802
        del self.ready[ready.value]
        return 0

    def cuGraphLaunch(self, ready: Any, stream: Any) -> int:  # noqa: N802
        self.launched.append((ready.value, stream.value))
        return 0


FORKED: list[Edge] = [(1, 2), (2, 3), (2, 4), (3, 5), (4, 5)]


def test_a_graph_is_cut_after_the_node_that_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.add(10, [5, 4, 3, 2, 1], list(FORKED))
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(graph_split, "load", lambda: driver)
    assert is_branched(10)
    rest = split_at_fork(10)
    assert rest is not None
    assert driver.graphs == {10: ([2, 1], [(1, 2)])}, "the clone is destroyed"
    assert driver.ready == {7: ([105, 104, 103], [(103, 105), (104, 105)])}
    rest.launch(33)
    assert driver.launched == [(7, 33)]
    del rest
    gc.collect()
    assert not driver.ready


@pytest.mark.parametrize(("edges", "refuses"), [(FORKED, "instantiate"), ([(2, 5), (3, 4)], "")])
def test_a_graph_that_cannot_be_cut_stays_unchanged(
    monkeypatch: pytest.MonkeyPatch, edges: list[Edge], refuses: str
) -> None:
    driver = Driver(refuses)
    driver.add(10, [1, 2, 3, 4, 5], list(edges))
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(graph_split, "load", lambda: driver)
    assert is_branched(10)
    assert split_at_fork(10) is None
    assert driver.graphs == {10: ([1, 2, 3, 4, 5], edges)}
