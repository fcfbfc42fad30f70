"""Who updates which parameters: every one once, and never later than the simple ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.runtime.job_state.proportional_split import SETTLED
from carpool.runtime.job_state.update_sharding import (
    UpdateCosts,
    UpdateSharding,
    UpdateShardingPlanner,
    divide,
    proportional_ranges,
)

SECONDS = st.floats(1e-12, 1e-6)
RANKS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6)
SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=30)


@given(SIZES, RANKS, st.floats(0.0, 1e-3), st.sampled_from(UpdateSharding))
def test_every_parameter_is_updated_once_and_none_of_the_simple_ways_is_quicker(
    sizes: list[int], ranks: list[tuple[float, float]], barrier_s: float, division: UpdateSharding
) -> None:
    costs = UpdateCosts(tuple(sizes), tuple(u for u, _ in ranks), tuple(c for _, c in ranks), barrier_s)
    ranges = divide(costs, division)
    if ranges:
        assert [index for owned in ranges for index in range(*owned)] == list(range(len(sizes)))
        assert len(ranges) == len(ranks)
    for simple in UpdateSharding:
        assert costs.predicted_s(divide(costs)) <= costs.predicted_s(divide(costs, simple))


@given(SIZES, st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6))
def test_stretches_cover_every_parameter_once(sizes: list[int], speeds: list[float]) -> None:
    ranges = proportional_ranges(sizes, speeds)
    assert [index for owned in ranges for index in range(*owned)] == list(range(len(sizes)))


def test_stretches_weigh_elements_and_speeds() -> None:
    assert proportional_ranges([10, 10, 10, 10, 100, 10], [1.0, 1.0]) == ((0, 4), (4, 6))
    assert proportional_ranges([1] * 6, [2.0, 1.0]) == ((0, 4), (4, 6))


def test_what_an_update_takes() -> None:
    costs = UpdateCosts((30, 10), (1.0, 2.0), (0.1, 0.2), 5.0)
    assert costs.predicted_s(()) == pytest.approx(2.0 * 40)
    assert costs.predicted_s(((0, 1), (1, 2))) == pytest.approx(30 * 1.1 + 30 * 0.2 + 5.0)


@pytest.mark.parametrize(
    ("copy_s", "expected"),
    [(1e-9, ((0, 6), (6, 9))), (1e-6, ())],
    ids=["copying is cheap: by speed", "copying is dear: all do all"],
)
def test_it_is_decided_by_what_was_measured_once_there_is_enough(
    copy_s: float, expected: tuple[tuple[int, int], ...]
) -> None:
    divider = UpdateShardingPlanner()
    fast, slow = ("cpu8", 1.0), ("cpu4", 1.0)
    sizes = (1_000_000,) * 9
    for _ in range(SETTLED):
        assert divider.ranges(sizes, [fast, slow]) == ()
        divider.measure(fast, 1e-7, copy_s)
        divider.measure(slow, 2e-7, copy_s)
    assert divider.ranges(sizes, [fast, slow]) == expected
    divider.measure(fast, 1.0, copy_s)
    assert divider.ranges(sizes, [fast, slow]) == expected, "decided once"


def test_what_is_ordered_needs_no_measurement() -> None:
    assert UpdateShardingPlanner(UpdateSharding.FIRST).ranges((5, 5), [("a", 1.0), ("b", 1.0)]) == ((0, 2), (2, 2))
    assert UpdateShardingPlanner(UpdateSharding.EVEN).ranges((5, 5), [("a", 1.0), ("b", 1.0)]) == ((0, 1), (1, 2))


@pytest.mark.parametrize(("divided_s", "is_kept"), [(0.8, True), (1.2, False)])
def test_a_division_that_proves_worse_than_none_is_given_up(divided_s: float, is_kept: bool) -> None:
    divider = UpdateShardingPlanner()
    traits = [("cpu8", 1.0), ("cpu4", 1.0)]
    sizes = (1_000_000,) * 9
    for _ in range(SETTLED):
        for trait, update_s in zip(traits, (1e-8, 2e-8), strict=True):
            divider.measure(trait, update_s, 1e-9)
        divider.passed(traits, (), 1.0)
    chosen = divider.ranges(sizes, traits)
    assert chosen
    for _ in range(SETTLED):
        divider.passed(traits, chosen, 9.0)  # new memory is touched for the first time
        assert divider.ranges(sizes, traits) == chosen
    for _ in range(SETTLED):
        divider.passed(traits, chosen, divided_s)
    assert divider.ranges(sizes, traits) == (chosen if is_kept else ())


def test_an_ordered_division_is_kept_whatever_it_takes() -> None:
    divider = UpdateShardingPlanner(UpdateSharding.EVEN)
    traits = [("cpu1", 1.0), ("cpu1", 1.0)]
    for between_s, ranges in ((1.0, ()), (5.0, divider.ranges((5, 5), traits))):
        for _ in range(2 * SETTLED):
            divider.passed(traits, ranges, between_s)
    assert divider.ranges((5, 5), traits) == ((0, 1), (1, 2))
