"""Higher priorities and pressing deadlines are served first, whatever the policy."""

from dataclasses import replace

import pytest

from carpool.core.constraints.priorities import weight_with_priority
from carpool.core.job_history import job_history
from carpool.core.messages import Assign, DeadlineMissed, Fact, JobFinished, JobSubmitted, Record, Woke
from carpool.core.model import JobId, JobSpec
from carpool.core.policy import Cadence, Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.policies.registry import parse_policy
from carpool.sim.traces.trace import Arrival
from carpool.testing.driver import drive
from carpool.testing.rig import check_state


class Ear:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)


def here(num_devices: int = 2, policy: Policy | None = None, **options: object) -> Scheduler:
    return Scheduler(Cluster.build([(1, num_devices, "V100")]), policy or Fifo(), **options)  # type: ignore[arg-type]


def spec(name: str, devices: int = 1, *, priority: int = 0, deadline_s: float = 0.0, work: float = 10.0) -> JobSpec:
    weight = weight_with_priority(1.0, priority)
    return JobSpec(JobId(name), devices, work, weight=weight, priority=priority, deadline_s=deadline_s)


def given(scheduler: Scheduler, at: float, *facts: Fact) -> list[str]:
    """Who starts at an instant, in order, all passes over it together."""
    begun: list[str] = []
    batch: tuple[Fact, ...] = facts
    for _ in range(10):
        begun += [order.job for order in scheduler.handle(at, batch) if isinstance(order, Assign)]
        check_state(scheduler)
        if scheduler.wake_at != at:
            return begun
        batch = (Woke(),)
    raise AssertionError("it asks to be woken again and again")


def jobs(*specs: JobSpec) -> list[Fact]:
    return [JobSubmitted(each) for each in specs]


def test_higher_priorities_start_first_and_lower_ones_last() -> None:
    scheduler = here(2)
    given(scheduler, 0.0, *jobs(spec("first", 2)))
    given(scheduler, 1.0, *jobs(spec("low", priority=-1), spec("a"), spec("b"), spec("high", priority=1)))
    assert given(scheduler, 2.0, JobFinished(JobId("first"), 1)) == ["high", "a"]
    assert given(scheduler, 3.0, JobFinished(JobId("high"), 1)) == ["b"]
    assert given(scheduler, 4.0, JobFinished(JobId("a"), 1)) == ["low"]


def test_devices_that_a_higher_one_cannot_use_are_given_to_lower_ones() -> None:
    scheduler = here(2, Fifo(bypass=True))
    assert given(scheduler, 0.0, *jobs(spec("running"))) == ["running"]
    begun = given(scheduler, 1.0, *jobs(spec("wide", 2, priority=1), spec("small")))
    assert begun == ["small"]
    assert [*scheduler.snapshot().waiting] == ["wide"]


def test_decisions_in_rounds_serve_all_ranks_in_one() -> None:
    scheduler = here(2, cadence=Cadence(round_s=60.0))
    assert given(scheduler, 0.0, *jobs(spec("high", priority=1), spec("low", priority=-1))) == ["high", "low"]


def test_a_deadline_presses_when_time_gets_short_and_goes_before_others() -> None:
    scheduler = here(1)
    given(scheduler, 0.0, *jobs(spec("running", work=50.0)))
    given(scheduler, 1.0, *jobs(spec("plain"), spec("dated", deadline_s=60.0)))
    assert scheduler.wake_at == 41.0, "twice its ten seconds before the end of its time"
    assert "59 s to its deadline" in (why := _why(scheduler, 2.0, "dated"))
    assert "presses" not in why
    assert given(scheduler, 41.0, Woke()) == []
    assert "urgent" in _why(scheduler, 41.5, "dated")
    assert given(scheduler, 50.0, JobFinished(JobId("running"), 1)) == ["dated"]


def _why(scheduler: Scheduler, at: float, job: str) -> str:
    scheduler.handle(at, [Woke()])
    return scheduler.why(scheduler.jobs[JobId(job)])


def test_without_haste_a_deadline_changes_nothing() -> None:
    scheduler = here(1)
    assert given(scheduler, 0.0, *jobs(spec("plain"), spec("dated", deadline_s=600.0))) == ["plain"]


def test_a_missed_deadline_is_a_fact_told_once_and_the_job_goes_on() -> None:
    ear = Ear()
    scheduler = here(1, observers=(ear,))
    given(scheduler, 0.0, *jobs(spec("late", work=100.0, deadline_s=30.0)))
    assert scheduler.wake_at == 30.0
    given(scheduler, 31.0, Woke())
    given(scheduler, 32.0, Woke())
    told = [fact for record in ear.records for fact in record.facts if isinstance(fact, DeadlineMissed)]
    assert told == [DeadlineMissed(JobId("late"))]
    assert "missed its deadline 2 s ago" in scheduler.why(scheduler.jobs[JobId("late")])
    assert (31.0, "missed its deadline; it keeps running") in [*job_history(ear.records, JobId("late"))]
    again = here(1)
    again.recover(ear.records)
    check_state(again)
    again.handle(40.0, [Woke()])


def test_a_balance_knows_who_is_ranked() -> None:
    scheduler = here(1)
    given(scheduler, 0.0, *jobs(spec("a")))
    given(scheduler, 0.5, *jobs(spec("b"), spec("high", priority=1)))
    again = here(1)
    again.restore(scheduler.state())
    assert given(again, 1.0, JobFinished(JobId("a"), 1)) == ["high"]


@pytest.mark.parametrize("policy", ["fifo", "sjf", "las", "srtf", "carpool", "gavel", "mps-equal", "afs"])
def test_policies_of_every_sort_finish_a_mixed_queue(policy: str) -> None:
    cluster = Cluster.build([(1, 2, "V100")])
    arrivals = [
        Arrival(
            float(i // 3), replace(spec(f"j{i}", 1 + i % 2, work=4.0), priority=i % 4 - 1, deadline_s=9.0 * (i % 3))
        )
        for i in range(12)
    ]
    run = drive(parse_policy(policy), cluster, arrivals, check=check_state, max_records=2_000)
    assert not run.scheduler.jobs
