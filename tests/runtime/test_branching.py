"""Which recordings are one chain of work."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.branching import Edge, branches, is_chain


@given(st.permutations(range(6)))
def test_nodes_one_after_another_are_a_chain_in_whatever_order_they_are_listed(nodes: list[int]) -> None:
    edges = list(itertools.pairwise(nodes))
    assert is_chain(len(nodes), sorted(edges))
    assert not is_chain(len(nodes), edges[1:]), "a node stands beside the others"


@pytest.mark.parametrize(
    "edges",
    [
        [(0, 1), (0, 2), (1, 3), (2, 3)],  # a fork and a join
        [(0, 1), (0, 2), (2, 3)],  # a fork alone
        [(0, 2), (1, 2), (2, 3)],  # two begins
        [(0, 1), (1, 2), (2, 3), (0, 3)],  # a way round
        [(0, 1), (2, 3)],  # two chains
    ],
)
def test_everything_else_has_branches(edges: list[Edge]) -> None:
    assert not is_chain(4, edges)


def test_one_node_and_none_are_chains() -> None:
    assert is_chain(1, [])
    assert is_chain(0, [])


def test_without_a_driver_nothing_is_said_to_have_branches() -> None:
    assert not branches(0)
