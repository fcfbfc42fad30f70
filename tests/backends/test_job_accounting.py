"""What a job's account says while facts about it come in, late ones too."""

from carpool.backends.job_accounting import JobAccount, JobAccounting
from carpool.core.messages import (
    Change,
    Fact,
    JobCrashed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    NodeLost,
    Planned,
    ProgressReported,
    Record,
    WeightChanged,
)
from carpool.core.model import Allocation, JobId, JobSpec, NodeId
from carpool.core.topology import Cluster

JOB = JobId("a")
CLUSTER = Cluster.build([(2, 2, "cpu")])


def kept(*records: Record) -> JobAccount:
    """The account of a job that got a device at once, after these records."""
    accounting = JobAccounting(CLUSTER)
    given = Planned("it is the only one", (Change(JOB, Allocation.of(0)),))
    for record in (Record(0.0, [JobSubmitted(JobSpec(JOB))], given), *records):
        accounting.record(record)
    return accounting.accounts[JOB]


def progress(done: float) -> Fact:
    return ProgressReported(JOB, generation=1, done=done, rate=30.0)


def test_a_running_job_has_the_rate_that_was_reported() -> None:
    account = kept(Record(1.0, [progress(30.0)]))
    assert (account.done, account.rate) == (30.0, 30.0)


def test_a_report_that_comes_after_a_job_was_taken_off_gives_it_no_rate() -> None:
    taken = Planned("another goes first", (Change(JOB, None),))
    account = kept(Record(1.0, [progress(30.0)]), Record(2.0, [], taken), Record(2.1, [progress(61.0)]))
    assert (account.done, account.rate) == (61.0, 0.0)


def test_a_report_that_comes_after_a_pause_gives_no_rate_either() -> None:
    account = kept(Record(1.0, [JobPaused(JOB)]), Record(1.1, [progress(31.0)]))
    assert (account.done, account.rate) == (31.0, 0.0)


def test_the_story_tells_of_pauses() -> None:
    account = kept(Record(1.0, [JobPaused(JOB)]), Record(5.0, [JobResumed(JOB)]))
    assert [(at, words.split()[0]) for at, words in account.story] == [(1.0, "paused"), (5.0, "resumed")]


def test_a_lost_node_takes_off_only_the_jobs_on_it() -> None:
    accounting = JobAccounting(CLUSTER)
    jobs = {JobId(name): Allocation.of(*devices) for name, devices in {"a": (0,), "b": (1, 2), "c": (3,)}.items()}
    given = Planned("all fit", tuple(Change(job, held) for job, held in jobs.items()))
    accounting.record(Record(0.0, [JobSubmitted(JobSpec(job)) for job in jobs], given))
    accounting.record(Record(5.0, [NodeLost(NodeId(0))]))
    held = {job: account.held for job, account in accounting.accounts.items()}
    assert held == {"a": None, "b": None, "c": Allocation.of(3)}
    assert [account.held_s for account in accounting.accounts.values()] == [5.0, 5.0, 0.0]


def causes(facts: list[Fact], *changes: Change) -> dict[JobId, str]:
    """The causes of a plan on a machine where a holds devices 0 and 1, and b holds 2."""
    accounting = JobAccounting(CLUSTER)
    specs = [JobSpec(JobId(name)) for name in ("a", "b", "c")]
    begin = Planned("two fit", (Change(JOB, Allocation.of(0, 1)), Change(JobId("b"), Allocation.of(2))))
    accounting.record(Record(0.0, [JobSubmitted(spec) for spec in specs], begin))
    accounting.record(Record(1.0, facts, Planned("prices; more prices", changes)))
    return {change.job: accounting.accounts[change.job].decisions[-1].summary for change in changes}


def test_a_start_names_the_job_whose_end_made_room() -> None:
    ended = JobFinished(JobId("b"), generation=1)
    assert causes([ended], Change(JobId("c"), Allocation.of(2))) == {"c": "b finished"}


def test_a_preemption_and_a_start_name_each_other() -> None:
    changes = Change(JobId("b"), None), Change(JobId("c"), Allocation.of(2))
    assert causes([], *changes) == {"b": "c starts there", "c": "b is preempted"}


def test_a_job_that_shrinks_names_the_job_that_takes_the_device() -> None:
    changes = Change(JOB, Allocation.of(0)), Change(JobId("c"), Allocation.of(1))
    assert causes([], *changes)[JOB] == "c starts there"


def test_without_another_job_the_plans_first_clause_is_the_cause() -> None:
    assert causes([], Change(JobId("c"), Allocation.of(3))) == {"c": "prices"}


def test_crashes_and_changes_by_the_user_are_in_the_story() -> None:
    crash = JobCrashed(JOB, generation=1, done=30.0, error="CUDA error 700")
    account = kept(Record(1.0, [WeightChanged(JOB, 4.0)]), Record(2.0, [crash]))
    assert account.restarts == 1
    assert ["weight changed by the user to 4" in account.story[0][1], "CUDA error 700" in account.story[1][1]] == [
        True,
        True,
    ]
