"""The deal at the margin: exact where it can be, and never more than there is."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.policies.market.knapsack import NONE, exact, solve_knapsack

NEEDS = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 1.0]])

tables = st.lists(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.7, 2.2, 4.0]), min_size=5, max_size=5), min_size=1, max_size=4
)


def total(values: np.ndarray, choice: np.ndarray) -> float:
    return float(sum(values[job, option] for job, option in enumerate(choice) if option != NONE))


def used(choice: np.ndarray) -> np.ndarray:
    return np.asarray(NEEDS[[option for option in choice if option != NONE]].sum(axis=0))


def best_of_all(values: np.ndarray, supply: np.ndarray) -> float:
    found = 0.0
    for combination in product(range(-1, len(NEEDS)), repeat=len(values)):
        choice = np.array(combination)
        if (used(choice) <= supply).all():
            found = max(found, total(values, choice))
    return found


@given(tables, st.integers(0, 5), st.integers(0, 4))
@settings(max_examples=40)
def test_exact_is_as_good_as_trying_everything(rows: list[list[float]], fast: int, slow: int) -> None:
    values, supply = np.array(rows), np.array([float(fast), float(slow)])
    choice = exact(values, NEEDS, supply)
    assert (used(choice) <= supply).all()
    assert np.isclose(total(values, choice), best_of_all(values, supply))


@given(tables, st.integers(0, 5), st.integers(0, 4), st.floats(0.0, 2.0))
@settings(max_examples=40)
def test_small_deals_are_exact_whatever_the_prices(rows: list[list[float]], fast: int, slow: int, price: float) -> None:
    values, supply = np.array(rows), np.array([float(fast), float(slow)])
    choice = solve_knapsack(values, NEEDS, supply, np.array([price, price / 2.0]))
    assert (used(choice) <= supply).all()
    assert all(values[job, option] > 0.0 for job, option in enumerate(choice) if option != NONE)
    assert np.isclose(total(values, choice), best_of_all(values, supply))


def test_a_large_deal_takes_all_there_is_and_no_more() -> None:
    random = np.random.default_rng(0)
    widths = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    values = random.uniform(0.5, 2.0, (900, 1)) * widths**0.7
    supply = np.array([2_000.0])
    choice = solve_knapsack(values, widths[:, None], supply, np.array([0.55]))
    taken = widths[choice[choice != NONE]].sum()
    assert 1_990.0 <= taken <= 2_000.0


def test_who_loses_least_takes_another_kind_where_one_is_short() -> None:
    """All would have the fast kind; those to whom the slow one is worth nearly as much go there, and nobody waits."""
    many = 400  # too many for an exact solution
    values = np.column_stack([np.full(many, 10.0), np.linspace(2.0, 9.0, many)])
    choice = solve_knapsack(values, np.eye(2), np.full(2, many / 2.0), np.array([0.9, 0.1]))
    assert (choice != NONE).all()
    assert total(values, choice) >= 0.999 * (10.0 * many / 2 + values[many // 2 :, 1].sum())


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.7]), min_size=20, max_size=60), st.integers(0, 3))
@settings(max_examples=40)
def test_of_many_that_few_devices_serve_the_best_are_served_and_the_first_of_equals(
    worths: list[float], devices: int
) -> None:
    choice = exact(np.array(worths)[:, None], np.ones((1, 1)), np.array([float(devices)]))
    order = sorted((job for job, worth in enumerate(worths) if worth > 0.0), key=lambda job: (-worths[job], job))
    assert np.flatnonzero(choice != NONE).tolist() == sorted(order[:devices])
