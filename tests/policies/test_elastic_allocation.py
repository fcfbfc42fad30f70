"""Shares with inheritance: weights, unlike speeds, tables that are not concave."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policies.elastic_allocation import Floats, concave, elastic_counts, elastic_split


def batch_cost(
    speeds: list[Floats], works: list[float], weights: list[float], plan: dict[tuple[int, ...], list[int]]
) -> float:
    """Weighted completion times when the set of jobs that is left determines the shares."""
    left, now, cost = dict(enumerate(works)), 0.0, 0.0
    while left:
        names = tuple(sorted(left))
        rates = {job: speeds[job][count] for job, count in zip(names, plan[names], strict=True)}
        step = min([left[job] / rate for job, rate in rates.items() if rate > 0.0])
        now += step
        for job, rate in rates.items():
            left[job] -= rate * step
        for job in [job for job in left if left[job] <= 1e-9 * works[job]]:
            del left[job]
            cost += weights[job] * now
    return cost


def ours(speeds: list[Floats], works: list[float], weights: list[float], devices: int) -> float:
    plan = {}
    jobs = range(len(works))
    for size in range(1, len(works) + 1):
        for names in itertools.combinations(jobs, size):
            # the longest first; jobs are given in that order
            plan[names] = elastic_counts([speeds[job] for job in names], [weights[job] for job in names], devices)
    return batch_cost(speeds, works, weights, plan)


def best_for_two(speeds: list[Floats], works: list[float], weights: list[float], devices: int) -> float:
    costs = []
    for first in range(devices + 1):
        plan = {(0,): [devices], (1,): [devices], (0, 1): [first, devices - first]}
        costs.append(batch_cost(speeds, works, weights, plan))
    return min(costs)


@pytest.mark.parametrize("seed", range(20))
def test_two_unlike_weighted_jobs_against_every_split(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = 32
    speeds = [np.arange(devices + 1.0) ** rng.uniform(0.3, 0.95) * rng.uniform(0.5, 2.0) for _ in range(2)]
    works = [float(rng.uniform(200.0, 400.0) * speeds[0][-1]), float(rng.uniform(10.0, 60.0) * speeds[1][-1])]
    weights = [1.0, float(rng.uniform(1.0, 4.0))]
    assert ours(speeds, works, weights, devices) <= best_for_two(speeds, works, weights, devices) * 1.002


def test_a_job_that_gains_nothing_gets_one_device() -> None:
    flat, steep = np.array([0.0, 1.0, 1.0, 1.0, 1.0]), np.array([0.0, 1.0, 1.8, 2.5, 3.0])
    assert elastic_counts([steep, flat], [1.0, 1.0], 4) == [3, 1]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_the_majorant_is_concave_and_touches(values: list[float]) -> None:
    table = np.array([0.0, *values])
    hull = concave(table)
    assert (hull >= table - 1e-9).all()
    assert (np.diff(hull, 2) <= 1e-9).all()
    assert hull[0] == table[0]
    assert hull[-1] == table[-1]


@given(st.integers(1, 40), st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6))
def test_no_more_is_dealt_than_there_is(devices: int, exponents: list[float]) -> None:
    speeds = [np.arange(devices + 1.0) ** exponent for exponent in exponents]
    counts = elastic_counts(speeds, [1.0] * len(speeds), devices)
    assert sum(counts) == devices
    assert min(counts) >= 0


def test_tables_that_fall_and_rise_are_taken_as_they_are() -> None:
    per_job, per_device = np.array([0.0, 0.66, 0.60, 0.83, 1.0]), np.array([0.0, 0.12, 0.42, 0.73, 1.0])
    assert elastic_split([per_job, per_job], [1.0, 1.0], 4).counts == [1, 3]  # the shorter has three
    assert elastic_split([per_job] * 3, [1.0] * 3, 4).counts == [1, 1, 1]  # two are slower than one
    assert elastic_split([per_device, per_device], [1.0, 1.0], 4).counts == [0, 4]


def test_on_concave_tables_both_ways_agree() -> None:
    for exponent in (0.3, 0.5, 0.8):
        table = np.arange(17.0) ** exponent
        assert elastic_split([table] * 4, [1.0] * 4, 16).counts == elastic_counts([table] * 4, [1.0] * 4, 16)


def test_a_job_that_cannot_run_gets_nothing() -> None:
    gang = np.array([0.0, 0.0, 0.0, 0.0, 0.0])
    assert elastic_split([gang, np.array([0.0, 1.0, 1.9, 2.7, 3.4])], [1.0, 1.0], 4).counts == [0, 4]
