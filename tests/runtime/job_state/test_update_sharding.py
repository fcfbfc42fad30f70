"""Which rank updates which parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.job_state.proportional_split import MIN_PASSES
from carpool.runtime.job_state.update_sharding import (
    UpdateCosts,
    UpdateSharding,
    UpdateShardingPlanner,
    choose_ranges,
    proportional_ranges,
)

SECONDS = st.floats(1e-12, 1e-6)
RANKS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6)
SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=30)


@given(SIZES, RANKS, st.floats(0.0, 1e-3), st.sampled_from(UpdateSharding))
def test_every_parameter_is_updated_once_and_no_fixed_sharding_is_faster(
    sizes: list[int], ranks: list[tuple[float, float]], barrier_s: float, sharding: UpdateSharding
) -> None:
    costs = UpdateCosts(tuple(sizes), tuple(u for u, _ in ranks), tuple(c for _, c in ranks), barrier_s)
    ranges = choose_ranges(costs, sharding)
    if ranges:
        assert [index for owned in ranges for index in range(*owned)] == list(range(len(sizes)))
        assert len(ranges) == len(ranks)
    for simple in UpdateSharding:
        assert costs.predicted_s(choose_ranges(costs)) <= costs.predicted_s(choose_ranges(costs, simple))


@given(SIZES, st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6))
def test_ranges_cover_every_parameter_once(sizes: list[int], speeds: list[float]) -> None:
    ranges = proportional_ranges(sizes, speeds)
    assert [index for owned in ranges for index in range(*owned)] == list(range(len(sizes)))


def test_ranges_follow_elements_and_speeds() -> None:
    assert proportional_ranges([10, 10, 10, 10, 100, 10], [1.0, 1.0]) == ((0, 4), (4, 6))
    assert proportional_ranges([1] * 6, [2.0, 1.0]) == ((0, 4), (4, 6))


def test_predicted_time_of_an_update() -> None:
    costs = UpdateCosts((30, 10), (1.0, 2.0), (0.1, 0.2), 5.0)
    assert costs.predicted_s(()) == pytest.approx(2.0 * 40)
    assert costs.predicted_s(((0, 1), (1, 2))) == pytest.approx(30 * 1.1 + 30 * 0.2 + 5.0)


@pytest.mark.parametrize(
    ("copy_s", "expected"),
    [(1e-9, ((0, 6), (6, 9))), (1e-6, ())],
    ids=["copies are cheap: by speed", "copies are expensive: all update all"],
)
def test_ranges_are_chosen_once_after_enough_measurements(copy_s: float, expected: tuple[tuple[int, int], ...]) -> None:
    planner = UpdateShardingPlanner()
    fast, slow = ("cpu8", 1.0), ("cpu4", 1.0)
    sizes = (1_000_000,) * 9
    for _ in range(MIN_PASSES):
        assert planner.ranges(sizes, [fast, slow]) == ()
        planner.measure(fast, 1e-7, copy_s)
        planner.measure(slow, 2e-7, copy_s)
    assert planner.ranges(sizes, [fast, slow]) == expected
    planner.measure(fast, 1.0, copy_s)
    assert planner.ranges(sizes, [fast, slow]) == expected, "decided once"


def test_a_fixed_sharding_needs_no_measurements() -> None:
    assert UpdateShardingPlanner(UpdateSharding.FIRST).ranges((5, 5), [("a", 1.0), ("b", 1.0)]) == ((0, 2), (2, 2))
    assert UpdateShardingPlanner(UpdateSharding.EVEN).ranges((5, 5), [("a", 1.0), ("b", 1.0)]) == ((0, 1), (1, 2))


@pytest.mark.parametrize(("sharded_s", "is_kept"), [(0.8, True), (1.2, False)])
def test_a_division_that_proves_worse_than_none_is_given_up(sharded_s: float, is_kept: bool) -> None:
    planner = UpdateShardingPlanner()
    shares = [("cpu8", 1.0), ("cpu4", 1.0)]
    sizes = (1_000_000,) * 9
    for _ in range(MIN_PASSES):
        for share, update_s in zip(shares, (1e-8, 2e-8), strict=True):
            planner.measure(share, update_s, 1e-9)
        planner.on_step(shares, (), 1.0)
    chosen = planner.ranges(sizes, shares)
    assert chosen
    for _ in range(MIN_PASSES):
        planner.on_step(shares, chosen, 9.0)  # new memory is touched for the first time
        assert planner.ranges(sizes, shares) == chosen
    for _ in range(MIN_PASSES):
        planner.on_step(shares, chosen, sharded_s)
    assert planner.ranges(sizes, shares) == (chosen if is_kept else ())


def test_an_ordered_division_is_kept_whatever_it_takes() -> None:
    planner = UpdateShardingPlanner(UpdateSharding.EVEN)
    shares = [("cpu1", 1.0), ("cpu1", 1.0)]
    for sync_s, ranges in ((1.0, ()), (5.0, planner.ranges((5, 5), shares))):
        for _ in range(2 * MIN_PASSES):
            planner.on_step(shares, ranges, sync_s)
    assert planner.ranges((5, 5), shares) == ((0, 1), (1, 2))
