"""Gavel's programs on instances whose optima can be worked out by hand, and their bounds on any instance."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from carpool.policies.gavel.lp import (
    Floats,
    Problem,
    finish_time_fairness,
    interior_point,
    largest_multiple,
    makespan,
    max_min,
    throughput,
)


def problem(
    rates: list[list[float]],
    capacity: list[float],
    *,
    widths: list[float] | None = None,
    weights: list[float] | None = None,
    left: list[float] | None = None,
    age_s: list[float] | None = None,
) -> Problem:
    ones = [1.0] * len(rates)
    return Problem(
        np.array(rates),
        np.array(widths or ones),
        np.array(weights or ones),
        np.array(left or ones),
        np.array(age_s or [0.0] * len(rates)),
        np.array(capacity),
    )


def fair(instance: Problem) -> Floats:
    return finish_time_fairness(instance, instance.left / instance.isolated)


def close(parts: Floats, expected: list[list[float]]) -> None:
    np.testing.assert_allclose(parts, expected, atol=1e-4)


# Job 0 gets A for x of its time and B for the rest, job 1 the other way round. With the time split evenly the rates
# are 2 and 1.5. Equal weights: (3x + (1−x))/2 = (2(1−x) + x)/1.5 at x = 1/2; weight 2 halves the left side: x = 13/14.
@pytest.mark.parametrize(("weight", "x"), [(1.0, 0.5), (2.0, 13 / 14)])
def test_max_min_equalises_what_jobs_get_of_what_they_are_due(weight: float, x: float) -> None:
    parts = max_min(problem([[3.0, 1.0], [2.0, 1.0]], [1.0, 1.0], weights=[weight, 1.0]))
    close(parts, [[x, 1 - x], [1 - x, x]])


def test_max_min_counts_the_devices_of_a_gang() -> None:
    # One kind of two devices: width·X is equal, and 2·X0 + X1 = 2 with X1 ≤ 1.
    close(max_min(problem([[1.0], [1.0]], [2.0], widths=[2.0, 1.0])), [[0.5], [1.0]])


def test_max_min_really_maximises_the_minimum() -> None:
    instance = problem([[4.0, 1.0, 0.5], [3.0, 2.5, 1.0], [1.0, 1.0, 0.0]], [1.0, 1.0, 1.0], widths=[1.0, 1.0, 1.0])
    proportional = instance.rates @ (instance.capacity / instance.capacity.sum())
    reached = (instance.rates * max_min(instance)).sum(axis=1) / proportional
    best, _ = largest_multiple(proportional, instance)
    assert reached.min() == pytest.approx(best, rel=1e-6)


def test_throughput_puts_jobs_where_their_sum_is_largest() -> None:
    close(throughput(problem([[3.0, 1.0], [2.0, 1.0]], [1.0, 1.0])), [[1.0, 0.0], [0.0, 1.0]])


def test_makespan_shares_one_device_by_remaining_work() -> None:
    close(makespan(problem([[1.0], [1.0]], [1.0], left=[10.0, 30.0])), [[0.25], [0.75]])


def test_makespan_gives_the_longest_job_all_it_can_use() -> None:
    parts = makespan(problem([[2.0, 1.0], [2.0, 1.0]], [1.0, 1.0], left=[10.0, 40.0]))
    assert (parts[1] * [2.0, 1.0]).sum() == pytest.approx(2.0, rel=1e-4)  # 40/20: the fast kind, all the time
    assert (parts[0] * [2.0, 1.0]).sum() >= 10.0 / 20.0 - 1e-4


@pytest.mark.parametrize(
    ("left", "age_s", "alone_s", "expected"),
    [
        ([10.0, 10.0], [0.0, 0.0], [20.0, 20.0], [0.5, 0.5]),
        ([10.0, 10.0], [0.0, 0.0], [10.0, 40.0], [0.8, 0.2]),
        # (5 + 5/a)/10 = (10/(1−a))/20 gives a² + a = 1.
        ([5.0, 10.0], [5.0, 0.0], [10.0, 20.0], [0.618034, 0.381966]),
    ],
)
def test_fairness_equalises_slowdowns(
    left: list[float], age_s: list[float], alone_s: list[float], expected: list[float]
) -> None:
    instance = problem([[1.0], [1.0]], [1.0], left=left, age_s=age_s)
    close(finish_time_fairness(instance, np.array(alone_s)), [[part] for part in expected])


def test_an_isolated_part_is_no_more_than_all_of_the_time() -> None:
    # Two jobs, 8 devices: each owns 4, but a job of one device cannot use more than one at a time.
    np.testing.assert_allclose(problem([[2.0], [2.0]], [8.0], widths=[1.0, 8.0]).isolated, [2.0, 1.0])


RATE = st.floats(0.01, 100.0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_jobs, num_kinds = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    capacity = draw(st.lists(st.integers(4, 16), min_size=num_kinds, max_size=num_kinds))
    row = st.lists(st.one_of(st.just(0.0), RATE), min_size=num_kinds, max_size=num_kinds).filter(any)

    def each(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=num_jobs, max_size=num_jobs))

    return problem(
        draw(st.lists(row, min_size=num_jobs, max_size=num_jobs)),
        [float(count) for count in capacity],
        widths=each(st.sampled_from([1.0, 2.0, 4.0])),
        weights=each(st.sampled_from([0.5, 1.0, 3.0])),
        left=each(st.floats(1.0, 1e6)),
        age_s=each(st.floats(0.0, 1e5)),
    )


@pytest.mark.parametrize("program", [max_min, throughput, makespan, fair])
@settings(max_examples=25)
@given(instance=problems())
def test_programs_stay_within_their_bounds(program: Callable[[Problem], Floats], instance: Problem) -> None:
    parts = program(instance)
    assert parts.shape == instance.rates.shape
    assert (parts >= 0.0).all()
    assert (parts.sum(axis=1) <= 1.0 + 1e-5).all()
    assert (instance.widths @ parts <= instance.capacity * (1.0 + 1e-5)).all()


@settings(max_examples=25)
@given(instance=problems())
def test_makespan_is_the_shortest(instance: Problem) -> None:
    ends = instance.left / (instance.rates * makespan(instance)).sum(axis=1)
    best, _ = largest_multiple(instance.left, instance)
    assert ends.max() == pytest.approx(1.0 / best, rel=1e-3)


@settings(max_examples=25)
@given(instance=problems())
def test_the_interior_point_costs_what_a_corner_costs(instance: Problem) -> None:
    cost = -instance.rates.ravel()
    rows = np.vstack([-np.eye(cost.size), np.eye(cost.size), np.ones((1, cost.size))])
    limits = np.concatenate([np.zeros(cost.size), np.ones(cost.size), [instance.widths.sum() / 2.0]])
    corner = linprog(cost, A_ub=rows, b_ub=limits, bounds=(None, None))
    assert cost @ interior_point(cost, rows, limits) == pytest.approx(corner.fun, rel=1e-6)


def test_among_equal_optima_the_centre_is_chosen() -> None:
    rows = np.vstack([-np.eye(2), np.ones((1, 2))])
    np.testing.assert_allclose(interior_point(np.array([-1.0, -1.0]), rows, np.array([0.0, 0.0, 1.0])), [0.5, 0.5])
