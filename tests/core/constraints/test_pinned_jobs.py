"""A job that cannot resume keeps its devices until it ends, whatever the policy and the priorities say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.constraints.priorities import weight_with_priority
from carpool.core.journal import spec_from_json, spec_to_json
from carpool.core.messages import Assign, JobPaused, JobSubmitted, Order, PolicyChanged, Record, Release, Woke
from carpool.core.metrics import Metrics
from carpool.core.model import JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.registry import POLICIES, parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.testing.rig import check_state


class Holdings:
    """An observer that notes each time a job gives up a device before it ends."""

    def __init__(self) -> None:
        self.held: dict[JobId, set[int]] = {}
        self.lost: list[JobId] = []

    def record(self, record: Record) -> None:
        for change in record.planned.changes if record.planned is not None else ():
            now: set[int] = set() if change.allocation is None else {*change.allocation.devices()}
            if not self.held.get(change.job, set()) <= now:
                self.lost.append(change.job)
            self.held[change.job] = now


def command(name: str, work: float, *, devices: int = 1, priority: int = 0, resumable: bool = False) -> JobSpec:
    weight = weight_with_priority(1.0, priority)
    return JobSpec(JobId(name), devices, work, weight=weight, priority=priority, resumable=resumable)


def replay(policy: str, arrivals: list[Arrival], devices: int) -> tuple[Holdings, Metrics]:
    seen = Holdings()
    cluster = Cluster.build([(1, devices, "V100")])
    return seen, simulate(arrivals, cluster, parse_policy(policy), observers=[seen])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_urgent_job_waits_for_one_that_cannot_resume(policy: str) -> None:
    arrivals = [
        Arrival(0.0, command("long", 1_000.0)),
        Arrival(10.0, command("urgent", 5.0, priority=2, resumable=True)),
        *(Arrival(20.0 + i, command(f"t{i}", 50.0, resumable=True)) for i in range(4)),
    ]
    seen, metrics = replay(policy, arrivals, 1)
    assert JobId("long") not in seen.lost
    assert metrics.summary().finished == 6


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"allox"}))
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_no_policy_takes_devices_from_a_job_that_cannot_resume(policy: str, data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 900), st.integers(1, 3), st.booleans()), max_size=7)
    )
    arrivals = [
        Arrival(float(at), command(f"j{i}", float(work), devices=devices, resumable=resumable))
        for i, (at, work, devices, resumable) in enumerate(sorted(rows))
    ]
    pinned = {arrival.spec.id for arrival in arrivals if not arrival.spec.resumable}
    seen, metrics = replay(policy, arrivals, 4)
    assert not pinned & set(seen.lost)
    assert metrics.summary().finished == len(arrivals)


def started(orders: list[Order]) -> list[str]:
    return [order.job for order in orders if isinstance(order, Assign)]


def test_only_its_user_stops_it() -> None:
    scheduler = Scheduler(Cluster.build([(1, 1, "V100")]), parse_policy("srtf"))
    assert started(scheduler.handle(0.0, [JobSubmitted(command("long", 900.0))])) == ["long"]
    assert scheduler.handle(1.0, [JobSubmitted(command("short", 1.0))]) == []
    orders = scheduler.handle(2.0, [JobPaused(JobId("long"))])
    check_state(scheduler)
    assert [order.job for order in orders if isinstance(order, Release)] == ["long"]
    assert started(orders) == ["short"]


def test_a_new_policy_keeps_jobs_that_cannot_resume_on_a_shared_device() -> None:
    scheduler = Scheduler(Cluster.build([(1, 1, "V100")]), parse_policy("mps-equal:slots=3"), find_policy=parse_policy)
    specs = [command("yields", 900.0, resumable=True), command("a", 900.0), command("b", 900.0)]
    assert sorted(started(scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs]))) == ["a", "b", "yields"]
    orders = scheduler.handle(1.0, [PolicyChanged("fifo")])
    scheduler.handle(2.0, [Woke()])
    check_state(scheduler)
    assert [order.job for order in orders if isinstance(order, Release)] == ["yields"]
    assert {name: job.phase for name, job in scheduler.jobs.items()} == {
        "a": Phase.RUNNING,
        "b": Phase.RUNNING,
        "yields": Phase.WAITING,
    }


def test_the_field_is_written_only_where_a_job_cannot_resume() -> None:
    assert "resumable" not in spec_to_json(command("a", 1.0, resumable=True))
    pinned = command("b", 1.0)
    assert spec_from_json(spec_to_json(pinned)) == pinned
