"""Ending the last job soonest: the prices against brute force over deals."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from carpool.policies.loss_phase.policy import makespan_split

JOB = np.array([0.0, 0.66, 0.60, 0.83, 1.0])
DEVICE = np.array([0.0, 0.12, 0.42, 0.73, 1.0])


def soonest(speeds: list[np.ndarray], work: list[float], devices: int) -> float:
    """The program with every deal listed."""
    deals = [each for each in product(range(devices + 1), repeat=len(speeds)) if 0 < sum(each) <= devices]
    rates = np.array([[table[k] for table, k in zip(speeds, each, strict=True)] for each in deals]).T
    found = linprog(np.ones(len(deals)), A_ub=-rates, b_ub=-np.array(work), method="highs").fun
    assert found is not None
    return float(found)


def test_two_jobs_whose_speeds_fall_and_rise() -> None:
    assert makespan_split([JOB, JOB], [300.0, 100.0], 4).counts == [3, 1]  # the longer must not be late
    assert sorted(makespan_split([DEVICE, DEVICE], [300.0, 100.0], 4).counts) == [0, 4]  # sharing costs too much


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.05, 3.0), min_size=4, max_size=4), min_size=1, max_size=3),
    st.lists(st.floats(1.0, 100.0), min_size=3, max_size=3),
)
def test_the_prices_are_those_of_the_optimum(tables: list[list[float]], work: list[float]) -> None:
    speeds = [np.array([0.0, *table]) for table in tables]
    work = work[: len(speeds)]
    found = makespan_split(speeds, work, 4)
    assert sum(v * left for v, left in zip(found.worth, work, strict=True)) == pytest.approx(
        soonest(speeds, work, 4), rel=1e-4
    )
    assert sum(found.counts) <= 4


def test_a_job_that_is_as_good_as_done_does_no_harm() -> None:
    assert sum(makespan_split([JOB, JOB], [0.0, 100.0], 4).counts) > 0
