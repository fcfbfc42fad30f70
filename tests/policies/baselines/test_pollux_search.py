"""The search behind Pollux: exact numbers, sound places."""

from itertools import product
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policies.baselines.pollux import Row, Stake, _Free, search

costs = st.floats(0.1, 100.0)


def stake(local: list[float], spread: list[float] | None = None, stay: float | None = None, held: Row = ()) -> Stake:
    stay = local[0] if stay is None else stay
    return Stake(np.array(local), np.array(spread or local), stay, held)


def run(sizes: list[int], stakes: list[Stake], iterations: int = 20, seed: int = 0) -> list[Row]:
    return search(sizes, stakes, Random(seed), iterations)


def total(stakes: list[Stake], rows: list[Row]) -> float:
    return sum(each.cost(row) for each, row in zip(stakes, rows, strict=True))


@given(st.integers(1, 6), st.lists(st.lists(costs, min_size=5, max_size=5), min_size=1, max_size=3))
def test_on_one_node_the_numbers_are_the_best_there_are(size: int, tables: list[list[float]]) -> None:
    stakes = [stake(table) for table in tables]
    best = min(
        sum(table[count] for table, count in zip(tables, dealt, strict=True))
        for dealt in product(range(5), repeat=len(tables))
        if sum(dealt) <= size
    )
    assert total(stakes, run([size], stakes, 0)) == pytest.approx(best)


@st.composite
def grounds(draw: st.DrawFn) -> tuple[list[int], list[Stake]]:
    """Nodes, and jobs that sit on them already, or wait."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    left, spread_on = list(sizes), set[int]()
    stakes = []
    for _ in range(draw(st.integers(1, 5))):
        top = draw(st.integers(1, 6))
        held: list[tuple[int, int]] = []
        if draw(st.booleans()):
            for node, free in enumerate(left):
                count = draw(st.integers(0, min(free, top - sum(count for _, count in held))))
                if count:
                    held.append((node, count))
        nodes = {node for node, _ in held}
        if len(held) > 1 and nodes & spread_on:
            held = []
        if len(held) > 1:
            spread_on |= nodes
        for node, count in held:
            left[node] -= count
        local, spread = (draw(st.lists(costs, min_size=top + 1, max_size=top + 1)) for _ in range(2))
        spread[0] = local[0]
        stakes.append(stake(local, spread, draw(costs) if held else local[0], tuple(held)))
    return sizes, stakes


@given(grounds(), st.integers(0, 3))
def test_nothing_is_overbooked_and_nothing_gets_worse(ground: tuple[list[int], list[Stake]], seed: int) -> None:
    sizes, stakes = ground
    rows = run(sizes, stakes, 10, seed)
    used, spread = [0] * len(sizes), [0] * len(sizes)
    for each, row in zip(stakes, rows, strict=True):
        assert row == tuple(sorted(row))
        assert sum(count for _, count in row) < len(each.local)
        for node, count in row:
            used[node] += count
            spread[node] += len(row) > 1
    assert all(taken <= size for taken, size in zip(used, sizes, strict=True))
    assert max(spread) <= 1, "two jobs that both span nodes met on one"
    assert total(stakes, rows) <= sum(each.stay for each in stakes) + 1e-9
    assert rows == run(sizes, stakes, 10, seed), "the same seed gives the same places"


def test_a_job_stays_where_moving_costs_more() -> None:
    held = ((1, 2),)
    assert run([4, 4], [stake([9.0, 5.0, 3.0, 2.9], stay=2.5, held=held)]) == [held]
    assert run([4, 4], [stake([9.0, 5.0, 3.0, 2.0], stay=2.5, held=held)]) == [((0, 3),)]


def test_forbidden_numbers_are_never_given() -> None:
    (row,) = run([2, 2], [stake([9.0, inf, inf, 1.0], [9.0, inf, inf, 2.0])])
    assert sorted(count for _, count in row) == [1, 2]
    assert run([1, 1], [stake([9.0, inf, inf, 1.0], [9.0, inf, inf, 2.0])]) == [()]


def test_the_search_frees_a_node_where_the_packing_failed() -> None:
    """Two single devices on two nodes stand in the way of a gang that wants a node for itself."""
    single = [9.0, 1.1]
    gang = stake([50.0, 40.0, 30.0, 20.0, 1.0], [50.0, 40.0, 30.0, 20.0, 18.0])
    stakes = [stake(single, stay=1.0, held=((0, 1),)), stake(single, stay=1.0, held=((1, 1),)), gang]
    rows = run([4, 4], stakes, 60)
    assert len(rows[2]) == 1
    assert total(stakes, rows) == pytest.approx(1.0 + 1.1 + 1.0)


def test_two_jobs_that_span_nodes_do_not_meet() -> None:
    free = _Free([4, 4])
    free.take(((0, 1), (1, 1)))
    assert free.fits(((0, 3),))
    assert not free.fits(((0, 1), (1, 1)))
    assert free.find(3, Random(0)) == ((0, 3),)
    assert free.find(4, Random(0)) is None


def test_a_plan_that_packs_badly_is_not_taken() -> None:
    """Two devices would be worth it on one node; what is left is one on each."""
    sitting = [stake([100.0, 100.0], stay=1.0, held=((node, 1),)) for node in (0, 1)]
    wide = stake([10.0, inf, 1.0], [10.0, inf, 13.0])
    assert run([2, 2], [*sitting, wide]) == [((0, 1),), ((1, 1),), ()]
