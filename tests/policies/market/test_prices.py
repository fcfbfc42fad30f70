"""Prices clear the market, and worths order jobs as the known optima do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policies.market.prices import Market, ends


def power_market(sizes: list[float], exponent: float, devices: int) -> Market:
    counts = np.arange(1.0, devices + 1.0)
    rates = np.tile(counts**exponent, (len(sizes), 1))
    return Market(rates, counts[:, None], np.array([float(devices)]), np.ones(len(sizes)), np.array(sizes))


def cleared(market: Market) -> tuple[np.ndarray, np.ndarray]:
    parts = ends(market.work, market.weights)
    return market.clear(parts), parts


def test_devices_that_nobody_waits_for_cost_nothing() -> None:
    market = Market(np.ones((3, 1)), np.ones((1, 1)), np.array([5.0]), np.ones(3), np.array([1.0, 2.0, 3.0]))
    prices, parts = cleared(market)
    assert prices[0] < 1e-3
    assert market.taken(prices, parts)[0] == 3.0


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.7])
def test_shares_of_a_batch_are_nearly_those_of_hesrpt(exponent: float) -> None:
    devices, sizes = 512, [100.0, 50.0, 20.0, 10.0]
    market = power_market(sizes, exponent, devices)
    prices, parts = cleared(market)
    values = market.worths(prices, parts)[:, None] * market.rates - market.needs @ prices
    edges = (np.arange(5) / 4) ** (1.0 / (1.0 - exponent))
    assert values.argmax(axis=1) + 1 == pytest.approx(np.diff(edges) * devices, abs=0.03 * devices)


def test_gangs_of_one_width_go_by_remaining_time_over_weight() -> None:
    weights, work = np.array([1.0, 1.0, 4.0, 1.0]), np.array([30.0, 10.0, 60.0, 20.0])
    market = Market(np.ones((4, 1)), np.array([[2.0]]), np.array([4.0]), weights, work)
    parts = ends(market.bills(np.array([0.5])), weights)
    prices = market.clear(parts)
    worths = market.worths(prices, parts)
    assert np.argsort(-worths[[0, 1, 3]]).tolist() == [1, 2, 0]
    assert worths[2] > worths[0]


def test_the_part_of_weight_left_counts_those_who_end_later_and_those_who_come() -> None:
    bills, weights = np.array([5.0, 1.0, 9.0]), np.array([1.0, 1.0, 2.0])
    assert ends(bills, weights).tolist() == [0.5, 0.75, 0.0]
    assert ends(bills, weights, 0.5).tolist() == [0.625, 0.75, 0.25]


@given(
    st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(0.5, 5.0), st.floats(0.1, 3.0)), min_size=1, max_size=12),
    st.integers(4, 32),
    st.floats(0.0, 0.5),
)
def test_no_more_is_wanted_than_there_is(jobs: list[tuple[float, float, float]], devices: int, replaced: float) -> None:
    counts = np.array([1.0, 2.0, 4.0])
    work, weights, speeds = (np.array(column) for column in zip(*jobs, strict=True))
    market = Market(speeds[:, None] * counts**0.8, counts[:, None], np.array([float(devices)]), weights, work)
    parts = ends(market.bills(np.array([0.1])), weights, replaced)
    prices = market.clear(parts)
    assert market.taken(prices, parts)[0] <= devices
    assert prices[0] == 0.0 or market.taken(prices / 3.0, parts)[0] >= market.taken(prices, parts)[0]


def test_along_a_direction_all_that_is_wanted_is_worth_no_more_than_all_there_is() -> None:
    random = np.random.default_rng(0)
    rates = np.column_stack([np.ones(40), random.uniform(0.2, 0.6, 40)])
    market = Market(rates, np.eye(2), np.array([4.0, 6.0]), np.ones(40), random.lognormal(4.0, 1.0, 40))
    parts = ends(market.work, market.weights)
    along = np.array([3.0, 1.0])
    prices = market.clear(parts, along=along)
    assert 1.0 / 1.44 <= prices[1] / prices[0] * 3.0 <= 1.44
    assert along @ market.taken(prices * 1.2, parts) <= along @ market.supply
    assert along @ market.taken(prices / 2.0, parts) > along @ market.supply


def test_what_nobody_may_take_changes_nothing_in_a_large_market() -> None:
    random = np.random.default_rng(5)
    jobs, widths = 400, np.array([1.0, 2.0, 4.0, 8.0])
    needs = np.concatenate([np.stack([widths, 0 * widths], 1), np.stack([0 * widths, widths], 1)])
    rates = random.uniform(0.5, 2.0, (jobs, 1)) * np.concatenate([widths**0.7, 0.4 * widths**0.7])
    rates[random.random((jobs, 8)) < 0.4] = 0.0
    rates[7] = 0.0
    weights, work, supply = random.uniform(1.0, 3.0, jobs), random.uniform(10.0, 1e3, jobs), np.array([300.0, 200.0])
    wide = np.concatenate([needs, np.tile(needs[:1], (8, 1))])
    market = Market(rates, needs, supply, weights, work)
    padded = Market(np.concatenate([rates, np.zeros((jobs, 8))], axis=1), wide, supply, weights, work)
    assert rates.size < 5_000 < padded.rates.size, "one is reckoned as a whole, the other by what jobs may take"
    parts = np.full(jobs, 0.5)
    for prices in (np.array([0.3, 0.1]), np.array([2.0, 0.5])):
        able = rates.any(axis=1)
        assert (market.worths(prices, parts) == padded.worths(prices, parts))[able].all()
        assert (market.taken(prices, parts) == padded.taken(prices, parts)).all()
