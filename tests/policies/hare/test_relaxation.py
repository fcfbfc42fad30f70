"""The relaxation: exact where the optimum is known, and a bound everywhere."""

import numpy as np
import pytest

from carpool.policies.hare.relaxation import Demand, lower_bound, solve, worth_at


def demand(
    speeds: list[list[float]], work: list[float], weights: list[float], capacity: list[float], **more: list[float]
) -> Demand:
    ones = [1.0] * len(work)
    return Demand(
        np.array(speeds),
        np.array(more.get("widths", ones)),
        np.array(work),
        np.array(weights),
        np.array(capacity),
        np.array(more.get("released", [0.0] * len(work))),
    )


def smith(work: list[float], weights: list[float]) -> float:
    """Σ w·C of the shortest per weight first on one device: the optimum."""
    now = total = 0.0
    for length, weight in sorted(zip(work, weights, strict=True), key=lambda job: job[0] / job[1]):
        now += length
        total += weight * now
    return total


@pytest.mark.parametrize("seed", range(5))
def test_on_one_device_the_bound_is_nearly_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, weights = rng.uniform(1.0, 20.0, 12).tolist(), rng.integers(1, 6, 12).astype(float).tolist()
    bound = lower_bound(demand([[1.0]] * 12, work, weights, [1.0]))
    assert 0.97 * smith(work, weights) <= bound <= smith(work, weights) * (1 + 1e-9)


def test_a_job_alone_takes_its_shortest_time() -> None:
    alone = demand([[0.5, 0.25]], [30.0], [2.0], [4.0, 8.0], widths=[2.0], released=[5.0])
    assert lower_bound(alone) == pytest.approx(2.0 * 30.0, rel=0.01)


def test_the_bound_counts_from_the_release() -> None:
    apart = demand([[1.0], [1.0]], [10.0, 10.0], [1.0, 1.0], [1.0], released=[0.0, 50.0])
    together = demand([[1.0], [1.0]], [10.0, 10.0], [1.0, 1.0], [1.0])
    assert lower_bound(apart) == pytest.approx(20.0, rel=0.05)
    assert lower_bound(together) == pytest.approx(30.0, rel=0.05)


def test_steep_jobs_get_the_fast_kind_and_flat_ones_the_slow() -> None:
    steep, flat = [1.0, 0.2], [1.0, 0.9]
    found = solve(demand([steep, flat], [10.0, 10.0], [1.0, 1.0], [1.0, 1.0]), 12)
    assert found.optimal
    fast, slow = found.prices[:, 0]
    of_steep, of_flat = found.worth - found.edges[1] / 2.0 / 10.0  # in the middle of the first interval
    assert of_steep * steep[0] - fast > of_steep * steep[1] - slow
    assert of_flat * flat[0] - fast <= of_flat * flat[1] - slow + 1e-9  # it would take either


def test_kinds_a_job_cannot_use_are_left_out() -> None:
    found = solve(demand([[0.0, 1.0], [1.0, 0.0]], [10.0, 10.0], [1.0, 1.0], [1.0, 1.0]), 6)
    assert found.optimal
    assert found.mean_s == pytest.approx([5.0, 5.0], rel=0.3)


def test_a_newcomer_values_its_work_as_the_program_would() -> None:
    jobs = demand([[1.0], [1.0], [1.0]], [10.0, 20.0, 30.0], [1.0, 1.0, 1.0], [1.0])
    found = solve(jobs, 24)
    assert worth_at(jobs, found.edges, found.prices, 0.0) == pytest.approx(found.worth, rel=0.15)
