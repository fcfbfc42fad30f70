"""AlloX against brute force on tiny instances, and its gang form."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from carpool.core.errors import InputError
from carpool.core.messages import Assign
from carpool.core.model import JobSpec
from carpool.core.topology import Cluster, Placement
from carpool.policies.baselines.allox import Allox
from carpool.testing import check_state, drive
from carpool.testing.scenarios import job
from tests.support.scaling_world import ScalingWorld


@dataclass(frozen=True, slots=True)
class Unrelated(ScalingWorld):
    """A job's rate on a kind is looked up: one that is fast here may be slow there."""

    rates: dict[tuple[str, str], float] = field(default_factory=dict)

    def rate(self, spec: JobSpec, placement: Placement) -> float:
        return self.rates[spec.id, placement.groups[0][0]]


def least_total(seconds: np.ndarray) -> float:
    """Least sum of completion times, trying every assignment of jobs to devices; each device goes shortest first."""
    num_jobs, num_devices = seconds.shape
    totals = []
    for choice in product(range(num_devices), repeat=num_jobs):
        total = 0.0
        for device in range(num_devices):
            mine = sorted(seconds[i, device] for i in range(num_jobs) if choice[i] == device)
            total += sum(float(np.sum(mine[: k + 1])) for k in range(len(mine)))
        totals.append(total)
    return min(totals)


@pytest.mark.parametrize("part", range(4))
def test_equals_brute_force_on_unlike_devices(part: int) -> None:
    rng = np.random.default_rng(part)
    for _ in range(50):
        num_jobs, num_devices = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        seconds = rng.uniform(1.0, 20.0, (num_jobs, num_devices))
        rates = {(f"j{i}", f"k{m}"): 100.0 / seconds[i, m] for i in range(num_jobs) for m in range(num_devices)}
        cluster = Cluster.build([(1, 1, f"k{m}") for m in range(num_devices)])
        arrivals = [job(f"j{i}", work=100.0) for i in range(num_jobs)]
        best = least_total(seconds)
        run = drive(Allox(preempt=False), cluster, arrivals, Unrelated(rates=rates), check=check_state)
        assert run.summary.avg_jct_s * num_jobs == pytest.approx(best, rel=1e-6)
        free = drive(Allox(), cluster, arrivals, Unrelated(rates=rates), check=check_state)
        assert free.summary.avg_jct_s * num_jobs <= best * (1.0 + 1e-6)  # who may move to a faster device may gain


def test_like_devices_serve_the_shortest_first() -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    arrivals = [job(f"j{i}", work=float(work)) for i, work in enumerate([9, 2, 5, 1, 7])]
    run = drive(Allox(), cluster, arrivals)
    assert [(at, order.job) for at, order in run.orders] == [(0, "j3"), (0, "j1"), (1, "j2"), (2, "j4"), (6, "j0")]


def test_leaves_a_slow_device_idle_where_waiting_is_better() -> None:
    cluster = Cluster.build([(1, 1, "V100"), (1, 1, "K80")])
    run = drive(Allox(), cluster, [job("a", work=10.0), job("b", work=10.0)], ScalingWorld(speeds={"V100": 10.0}))
    assert [
        (at, order.job, list(order.allocation.devices())) for at, order in run.orders if isinstance(order, Assign)
    ] == [
        (0.0, "a", [0]),
        (1.0, "b", [0]),
    ]


def test_newcomers_preempt_only_if_they_may() -> None:
    one = Cluster.build([(1, 1, "V100")])
    arrivals = [job("long", work=50.0), job("short", work=5.0, at=10.0)]
    assert drive(Allox(), one, arrivals).summary.preemptions == 1
    assert drive(Allox(preempt=False), one, arrivals).summary.preemptions == 0


def test_gangs_need_the_gang_form() -> None:
    four = Cluster.build([(1, 4, "V100")])
    with pytest.raises(InputError, match="gang=true"):
        drive(Allox(), four, [job("wide", 4)])
    assert drive(Allox(gang=True), four, [job("wide", 4), job("b", 2), job("c", 2)]).summary.finished == 3


def test_a_wide_job_that_accepts_one_device_gets_one() -> None:
    run = drive(Allox(), Cluster.build([(1, 4, "V100")]), [job("wide", 4, 10.0, between=(1, 4))])
    assert [order.allocation.num_devices for _, order in run.orders if isinstance(order, Assign)] == [1]
