"""No two jobs share a device under the default policy while a device that one of them could use is free."""

from __future__ import annotations

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.messages import JobFinished, Record
from carpool.core.model import DeviceId, JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.market.policy import Carpool
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival

Jobs = list[tuple[float, int, float, float]]  # when it comes, its devices, work and weight

WIDE_JOBS_WAIT: list[Jobs] = [
    [(0, 2, 50, 1), (30, 1, 200, 1), (30, 1, 200, 1), (60, 2, 50, 1), (61, 2, 50, 1)],
    [(0, 1, 50, 1), (1, 1, 2000, 3), (1, 2, 2000, 1), (31, 2, 2000, 3), (61, 2, 200, 1)],
]


class Devices:
    """An observer that counts plans after which jobs share a device although another one is free."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: dict[JobId, tuple[DeviceId, ...]] = {}
        self.wasted: list[tuple[float, dict[JobId, tuple[DeviceId, ...]]]] = []

    def record(self, record: Record) -> None:
        for fact in record.facts:
            if isinstance(fact, JobFinished):
                self._held.pop(fact.job, None)
        if record.planned is None:
            return
        for change in record.planned.changes:
            self._held.pop(change.job, None)
            if change.allocation is not None:
                self._held[change.job] = tuple(change.allocation.devices())
        used = [device for devices in self._held.values() for device in devices]
        if len(set(used)) < min(self._count, len(used)):
            self.wasted.append((record.at, dict(self._held)))


@pytest.mark.parametrize("jobs", WIDE_JOBS_WAIT)
def test_jobs_do_not_share_beside_a_free_device(jobs: Jobs) -> None:
    arrivals = [
        Arrival(at, JobSpec(JobId(f"j{number}"), devices, work, model=f"m{number}", weight=weight))
        for number, (at, devices, work, weight) in enumerate(jobs)
    ]
    cluster, seen = Cluster.build([(1, 2, "cpu1")]), Devices(2)
    simulate(arrivals, cluster, Carpool(), estimator=OnlineEstimator(cluster), report_every_s=10.0, observers=[seen])
    assert seen.wasted == []
