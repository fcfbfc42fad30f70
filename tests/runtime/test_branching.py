"""Where recordings stop being one chain of work."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.branching import Edge, branches, chain, cut


@given(st.permutations(range(6)), st.permutations(range(5)))
def test_nodes_one_after_another_are_a_chain_in_whatever_order_they_are_listed(
    nodes: list[int], order: list[int]
) -> None:
    edges = list(itertools.pairwise(nodes))
    assert chain(sorted(nodes), [edges[place] for place in order]) == nodes
    assert chain(nodes, edges[1:]) == [], "a node stands beside the others"


@pytest.mark.parametrize(
    ("edges", "first"),
    [
        ([(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)], [0, 1]),  # a fork and a join
        ([(0, 1), (1, 2), (2, 3), (2, 4)], [0, 1, 2]),  # a fork alone
        ([(0, 2), (1, 2), (2, 3), (3, 4)], []),  # two begins
        ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], [0]),  # a way round
        ([(0, 1), (2, 3), (3, 4)], []),  # two chains
    ],
)
def test_a_chain_ends_with_the_first_node_that_forks(edges: list[Edge], first: list[int]) -> None:
    assert chain(range(5), edges) == first


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda edge: edge[0] < edge[1])))
def test_what_is_left_hangs_on_the_end_of_the_chain_alone(edges: set[Edge]) -> None:
    first = chain(range(8), sorted(edges))
    assert set(itertools.pairwise(first)) <= edges
    behind = {start for start, end in edges if start in first and end not in first}
    assert behind <= set(first[-1:])
    assert not [edge for edge in edges if edge[0] not in first and edge[1] in first]


def test_one_node_and_none_are_chains() -> None:
    assert chain([3], []) == [3]
    assert chain([], []) == []


def test_without_a_driver_nothing_is_said_to_have_branches_and_nothing_is_cut() -> None:
    assert not branches(0)
    assert cut(0) is None
