"""Reasons for waiting and blocked jobs name the jobs that they wait for, under every policy with the base `why`."""

from carpool.core.messages import AssignApplied, JobSubmitted
from carpool.core.model import JobId, JobSpec
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo


def queue(*specs: JobSpec) -> Scheduler:
    scheduler = Scheduler(Cluster.build([(1, 1, "V100")]), Fifo())
    for order in scheduler.handle(0.0, [JobSubmitted(spec) for spec in specs]):
        scheduler.handle(0.0, [AssignApplied(order.job, order.generation, 0.0)])
    return scheduler


def test_a_waiting_job_is_told_which_job_ends_next_and_when() -> None:
    scheduler = queue(JobSpec(JobId("s8"), 1, 40.0), JobSpec(JobId("next"), 1, 5.0))
    why = scheduler.why(scheduler.jobs[JobId("next")])
    assert "s8 on " in why
    assert "about 40 s" in why


def test_a_blocked_job_names_what_blocks_it() -> None:
    scheduler = queue(JobSpec(JobId("first"), 1, 40.0), JobSpec(JobId("then"), 1, 5.0, after=(JobId("first"),)))
    assert "first (running)" in scheduler.why(scheduler.jobs[JobId("then")])


def test_an_unknown_end_is_not_invented() -> None:
    scheduler = queue(JobSpec(JobId("endless")), JobSpec(JobId("next"), 1, 5.0))
    why = scheduler.why(scheduler.jobs[JobId("next")])
    assert "about" not in why
    assert "held by endless" in why
