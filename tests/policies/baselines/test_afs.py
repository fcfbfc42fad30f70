"""AFS against the optimum for jobs that speed up as a power of their devices."""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import minimize

from carpool.core.messages import Assign
from carpool.core.topology import Cluster
from carpool.policies.baselines.afs import Afs
from carpool.testing import Driven, check_state, drive
from carpool.testing.scenarios import job
from tests.support.scaling_world import ScalingWorld

EXPONENTS = (0.3, 0.5, 0.7, 0.9)


def hesrpt(sizes: Sequence[float], exponent: float, devices: int) -> float:
    """Mean completion time of heSRPT (Berg, Vesilo, Harchol-Balter 2020), optimal for a batch with s(k) = k^p.

    Of n jobs by descending size the i-th holds (i/n)^(1/(1-p)) - ((i-1)/n)^(1/(1-p)) of the devices.
    """
    left, now, total = sorted(sizes, reverse=True), 0.0, 0.0
    while left:
        n = len(left)
        edges = (np.arange(n + 1) / n) ** (1.0 / (1.0 - exponent))
        rates = (np.diff(edges) * devices) ** exponent
        now += left[-1] / rates[-1]  # the smallest ends first
        total += now
        left = [size - rate * left[-1] / rates[-1] for size, rate in zip(left[:-1], rates[:-1], strict=True)]
    return total / len(sizes)


def afs(sizes: Sequence[float], exponent: float, devices: int, policy: Afs) -> float:
    arrivals = [job(f"j{i}", 1, size, between=(1, devices)) for i, size in enumerate(sizes)]
    cluster = Cluster.build([(1, devices, "V100")])
    run = drive(policy, cluster, arrivals, ScalingWorld(exponent=exponent), check=check_state)
    assert run.summary.finished == len(sizes)
    return run.summary.avg_jct_s


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_formula_of_hesrpt_is_optimal_for_two_and_three_jobs(exponent: float) -> None:
    for sizes in ([1.0, 3.0], [1.0, 2.0, 4.0]):
        n = len(sizes)

        def cost(logits: np.ndarray, sizes: Sequence[float] = sizes, n: int = n) -> float:
            """Mean completion time when the shares between two endings are constant; the smallest ends first."""
            left, now, total, first = np.array(sizes), 0.0, 0.0, 0
            for phase in range(n):
                shares = np.exp(np.append(logits[first : first + n - phase - 1], 0.0))
                first += n - phase - 1
                rates = (shares / shares.sum() * 10) ** exponent
                now += left[0] / rates[0]
                total += now
                left = left[1:] - rates[1:] * left[0] / rates[0]
                if (left < 0.0).any():
                    return 1e3
            return total / n

        start = np.zeros(n * (n - 1) // 2)
        found = minimize(cost, start, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000})
        assert hesrpt(sizes, exponent, 10) <= found.fun * (1.0 + 1e-9)
        assert hesrpt(sizes, exponent, 10) == pytest.approx(found.fun, rel=1e-3)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_full_optimism_is_exact_for_two_jobs_and_close_for_five(exponent: float) -> None:
    rng = np.random.default_rng(7)
    for n, limit in ((2, 1.003), (5, 1.03)):
        sizes = rng.lognormal(6.0, 1.0, n).tolist()
        assert 0.999 < afs(sizes, exponent, 128, Afs(optimism=1.0)) / hesrpt(sizes, exponent, 128) < limit


@pytest.mark.parametrize(("exponent", "limit"), [(0.3, 1.03), (0.5, 1.06), (0.7, 1.18), (0.9, 1.48)])
def test_afs_itself_expects_no_gift_from_those_who_end(exponent: float, limit: float) -> None:
    """Without arrivals its near-equal shares cost more the better jobs scale; optimism closes most of the gap."""
    sizes = np.random.default_rng(3).lognormal(6.0, 1.0, 8).tolist()
    plain, hopeful = (afs(sizes, exponent, 128, Afs(optimism=hope)) for hope in (0.0, 1.0))
    best = hesrpt(sizes, exponent, 128)
    assert 0.999 * best < hopeful < plain < limit * best


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_looking_ahead_is_optimal_for_a_batch(exponent: float) -> None:
    rng = np.random.default_rng(11)
    for n in (2, 5, 16):
        sizes = rng.lognormal(6.0, 1.0, n).tolist()
        assert 0.999 < afs(sizes, exponent, 128, Afs(ahead=True)) / hesrpt(sizes, exponent, 128) < 1.005


def final(run: Driven) -> dict[str, int]:
    """The devices each job held last."""
    return {order.job: order.allocation.num_devices for _, order in run.orders if isinstance(order, Assign)}


def test_short_jobs_first_when_there_are_more_jobs_than_devices() -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    arrivals = [job(name, 1, work, between=(1, 2)) for name, work in (("c", 30.0), ("a", 1.0), ("b", 2.0))]
    run = drive(Afs(), cluster, arrivals, ScalingWorld(exponent=0.5))
    assert [order.job for at, order in run.orders if at == 0.0] == ["a", "b"]


@pytest.mark.parametrize("policy", [Afs(), Afs(ahead=True)])
def test_widths_keep_to_what_jobs_accept(policy: Afs) -> None:
    cluster = Cluster.build([(1, 8, "V100")])
    arrivals = [job("rigid", 3), job("up", 1, 10.0, between=(1, 2)), job("gang", 2, 10.0, between=(2, 8))]
    run = drive(policy, cluster, arrivals, ScalingWorld(exponent=0.5), check=check_state)
    first = {
        order.job: order.allocation.num_devices for at, order in run.orders if at == 0.0 and isinstance(order, Assign)
    }
    assert first == {"rigid": 3, "up": 2, "gang": 3}


def test_a_job_that_no_kind_can_hold_is_left_out() -> None:
    cluster = Cluster.build([(1, 1, "K80"), (1, 1, "V100")])
    run = drive(Afs(), cluster, [job("wide", 2), job("a", 1, 1.0), job("b", 1, 2.0)], ScalingWorld(), check=check_state)
    assert {str(order.job) for _, order in run.orders} == {"a", "b"}


def test_a_job_without_gain_gets_no_more() -> None:
    cluster = Cluster.build([(1, 8, "V100")])
    run = drive(Afs(), cluster, [job("flat", 1, 10.0, between=(1, 8))], ScalingWorld(exponent=0.0))
    assert final(run) == {"flat": 1}


def test_unlike_kinds_are_not_mixed_and_the_fastest_goes_first() -> None:
    cluster = Cluster.build([(1, 4, "K80"), (1, 2, "V100")])
    arrivals = [job("a", 1, 10.0, between=(1, 6)), job("b", 1, 20.0, between=(1, 6))]
    run = drive(Afs(), cluster, arrivals, ScalingWorld(exponent=0.8, speeds={"V100": 3.0}), check=check_state)
    for _, order in run.orders:
        if isinstance(order, Assign):
            assert len({cluster.kind_of(device) for device in order.allocation.devices()}) == 1
