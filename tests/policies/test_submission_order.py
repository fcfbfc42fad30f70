"""Under every policy equal jobs start in the order in which they were submitted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.estimates import Estimate
from carpool.core.messages import Record
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.queue import in_submission_order, twin_key
from carpool.core.topology import Cluster
from carpool.policies.registry import POLICIES, parse_policy
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


class UnknownLengths(OnlineEstimator):
    """The live estimator for jobs that do not declare their lengths."""

    def remaining(self, job: Job, at: float) -> Estimate:
        return super().remaining(job._replace(spec=replace(job.spec, work=None)), at)


def starts(policy: str, arrivals: list[Arrival], devices: int, *, live: bool) -> dict[JobId, float]:
    cluster, seen = Cluster.build([(1, devices, "cpu")]), Starts()
    estimator, every_s = (UnknownLengths(cluster), 10.0) if live else (None, None)
    simulate(arrivals, cluster, parse_policy(policy), estimator=estimator, report_every_s=every_s, observers=[seen])
    return seen.at


@pytest.mark.parametrize("live", [False, True], ids=["declared", "unknown"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=4, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 1.0, 30.0, 150.0]), min_size=3, max_size=7),
    devices=st.integers(1, 3),
    width=st.integers(1, 2),
)
def test_equal_jobs_start_in_submission_order(
    policy: str, live: bool, gaps: list[float], devices: int, width: int
) -> None:
    width = 1 if policy == "allox" else min(width, devices)
    at, arrivals = 0.0, []
    for number, gap in enumerate(gaps):
        at += gap
        arrivals.append(Arrival(at, JobSpec(JobId(f"j{number}"), width, 100.0, model="sleep")))
    begun = starts(policy, arrivals, devices, live=live)
    times = [begun[arrival.spec.id] for arrival in arrivals]
    assert times == sorted(times)


@pytest.mark.parametrize("gaps", [[0.0] * 6, [0.0, 5.0] + [0.0] * 6, [0.0, 7.0, 0.0, 0.0, 3.0, 0.0, 0.0]])
@pytest.mark.parametrize("devices", [1, 2])
def test_equal_jobs_that_share_devices_start_in_submission_order(gaps: list[float], devices: int) -> None:
    arrivals = [
        Arrival(sum(gaps[: number + 1]), JobSpec(JobId(f"j{number}"), 1, 100.0, model="sleep"))
        for number in range(len(gaps))
    ]
    begun = starts("carpool", arrivals, devices, live=True)
    times = [begun[arrival.spec.id] for arrival in arrivals]
    assert times == sorted(times)
    assert len(set(times)) < len(times), "no two jobs start together: nothing shares a device here"


@pytest.mark.parametrize("policy", ["carpool", "elastic"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_long_queue_of_equal_jobs_is_served_in_order(policy: str, devices: int) -> None:
    arrivals = [Arrival(3.0 * number, JobSpec(JobId(f"j{number}"), 1, 100.0)) for number in range(120)]
    begun = starts(policy, arrivals, devices, live=False)
    times = [begun[arrival.spec.id] for arrival in arrivals]
    assert times == sorted(times)


def test_results_are_exchanged_among_equal_jobs_only() -> None:
    def waiting(name: str, seq: int, work: float) -> Job:
        return Job(JobSpec(JobId(name), 1, work), seq, 0.0, phase="waiting")  # type: ignore[arg-type]

    jobs = [waiting("c", 2, 5.0), waiting("a", 0, 5.0), waiting("long", 1, 9.0)]
    assert twin_key(jobs[0]) == twin_key(jobs[1]) != twin_key(jobs[2])
    assert in_submission_order(jobs, [1, 3, 2], key=int) == [3, 1, 2]
