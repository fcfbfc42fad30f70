"""Multifactor priority: factors order the queue, and backfill delays no reservation."""

from collections.abc import Mapping

from carpool.core.messages import Record
from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.baselines.multifactor import Multifactor
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival


class Starts:
    """An observer that keeps when each job started first."""

    def __init__(self) -> None:
        self.at: dict[JobId, float] = {}

    def record(self, record: Record) -> None:
        for change in record.planned.changes if record.planned is not None else ():
            if change.allocation is not None:
                self.at.setdefault(change.job, record.at)


def starts(arrivals: list[Arrival], devices: int) -> Mapping[JobId, float]:
    seen = Starts()
    simulate(arrivals, Cluster.build([(1, devices, "V100")]), Multifactor(), observers=[seen])
    return seen.at


def spec(name: str, devices: int, work: float, user: str = "") -> JobSpec:
    return JobSpec(JobId(name), devices, work, user=user)


def test_a_short_job_passes_and_a_long_one_would_delay_the_reservation() -> None:
    arrivals = [Arrival(0.0, spec("first", 3, 100.0)), Arrival(1.0, spec("wide", 4, 50.0))]
    arrivals += [Arrival(2.0, spec("long", 1, 200.0)), Arrival(3.0, spec("short", 1, 50.0))]
    assert starts(arrivals, 4) == {"first": 0.0, "wide": 100.0, "short": 3.0, "long": 150.0}


def test_the_user_who_used_less_goes_first() -> None:
    arrivals = [Arrival(0.0, spec("a0", 1, 100.0, "a")), Arrival(1.0, spec("a1", 1, 100.0, "a"))]
    arrivals += [Arrival(2.0, spec("b0", 1, 100.0, "b"))]
    assert starts(arrivals, 1) == {"a0": 0.0, "b0": 100.0, "a1": 200.0}
