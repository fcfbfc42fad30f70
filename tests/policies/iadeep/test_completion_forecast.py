"""When the jobs of a device end: alone, together, and after the first has gone."""

from __future__ import annotations

import pytest

from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.model import DeviceId, JobId, JobSpec, Kind
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.topology import Cluster, Placement
from carpool.policies.iadeep.policy import CompletionForecast
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival

KIND = Kind("V100")


class Halved(DeclaredEstimator):
    """Every neighbour halves the speed."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(0.5 ** len(placement.neighbours))


class Asking(Policy):
    """Writes down what a flow says of all waiting jobs together."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cost = 0.0

    def plan(self, view: Snapshot) -> Plan:
        flow = CompletionForecast(view)
        guests = flow.colocated(DeviceId(0), [view.jobs[job] for job in view.waiting])
        if guests and not self.ends:
            self.ends, self.cost = flow.ends(KIND, guests), flow.cost(KIND, guests)
        return Plan.NOTHING


@pytest.mark.parametrize(
    ("works", "ends"),
    [((10.0,), [10.0]), ((10.0, 10.0), [20.0, 20.0]), ((10.0, 30.0), [20.0, 40.0]), ((30.0, 10.0), [40.0, 20.0])],
)
def test_ends(works: tuple[float, ...], ends: list[float]) -> None:
    policy = Asking()
    arrivals = [Arrival(0.0, JobSpec(JobId(f"j{i}"), 1, work, f"m{i}", weight=2.0)) for i, work in enumerate(works)]
    simulate(arrivals, Cluster.build([(1, 1, KIND)]), policy, estimator=Halved())
    assert policy.ends == pytest.approx(ends)
    assert policy.cost == pytest.approx(2.0 * sum(ends))
