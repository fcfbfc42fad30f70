"""A policy that fails, however it does, costs nobody anything: another one decides, and the journal knows."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any

import pytest

from carpool.core.draft import Draft
from carpool.core.errors import CarpoolError
from carpool.core.estimates import Estimator
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Change,
    Fact,
    JobFinished,
    JobPaused,
    JobSubmitted,
    Order,
    PolicyChanged,
)
from carpool.core.model import Allocation, Job, JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import snapshot_from_json, snapshot_to_json
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.testing.rig import check_state

CLUSTER = Cluster.build([(1, 2, "cpu")])
POISON = JobId("poison")
NOBODY: dict[JobId, Any] = {}


@dataclass(frozen=True)
class Moody(Policy):
    """In order of submission, until a certain job is there."""

    how: str

    @property
    def keeps_running_order(self) -> bool:  # type: ignore[override]
        return self.how == "running key"

    def plan(self, view: Snapshot) -> Plan:
        if POISON in view.jobs and self.how in ANSWERS:
            plan = ANSWERS[self.how](view)
            assert plan is None or isinstance(plan, Plan)
            return plan  # type: ignore[return-value]
        draft = Draft(view)
        draft.fill()
        return draft.finish("in order")

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        if job.id == POISON and self.how in KEYS:
            return KEYS[self.how](job)
        if self.how == "no order" and job.seq % 3:
            return float("nan")
        return float(job.seq)

    def running_key(self, job: Job, estimates: Estimator) -> Any:
        return NOBODY[job.id] if job.id == POISON else job.seq

    def why(self, view: Snapshot, job: Job) -> str:
        raise KeyError(job.id)


def leaves(view: Snapshot) -> Plan:
    raise SystemExit(1)


ANSWERS: dict[str, Callable[[Snapshot], object]] = {
    "raises": lambda view: NOBODY[POISON],
    "leaves": leaves,
    "no plan": lambda view: None,
    "overbooks": lambda view: Plan((Change(POISON, Allocation.of(0)),), "pushes in"),
    "nowhere": lambda view: Plan((Change(POISON, Allocation.of(7)),), "where nothing is"),
    "halfway": lambda view: Plan((Change(JobId("a"), None), Change(POISON, Allocation.of(0, 1))), "wide"),
    "no job": lambda view: Plan((Change(JobId("nobody"), None),), "whom?"),
    "no words": lambda view: Plan((Change(JobId("a"), None),), 7),  # type: ignore[arg-type]
    "secret note": lambda view: Plan((Change(JobId("a"), None),), "noted", note=object()),
    "odd batch": lambda view: Plan(
        (Change(JobId("a"), Allocation.of(0, batch_size=object())),),  # type: ignore[arg-type]
        "tuned",
    ),
    "too late": lambda view: Plan((), "later", wake_at=view.at - 1.0),
    "never": lambda view: Plan((), "later", wake_at=nan),
    "shares": lambda view: Plan((Change(POISON, Allocation.of(0, fraction=0.5)),), "shares"),
}
KEYS: dict[str, Callable[[Job], object]] = {
    "key": lambda job: NOBODY[job.id],
    "odd key": lambda job: "first",
}


def found(text: str) -> Policy:
    return {"fifo": Fifo(bypass=True)}.get(text) or Moody(text)


class Harness:
    """A scheduler with a journal, and its orders so far."""

    def __init__(self, policy: str) -> None:
        self.text = io.StringIO()
        writer = JournalWriter(self.text, Header("1", policy, CLUSTER))
        self.scheduler = opened(policy)
        self.scheduler.add_observer(writer)
        self.orders: list[Order] = []

    def say(self, at: float, *facts: Fact) -> None:
        self.orders += self.scheduler.handle(at, facts)
        check_state(self.scheduler)

    def assigned(self) -> list[str]:
        return [order.job for order in self.orders if isinstance(order, Assign)]


def opened(policy: str) -> Scheduler:
    return Scheduler(CLUSTER, found(policy), find_policy=found, fallback="fifo")


def submitted(name: str, priority: int = 0) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), 1, 100.0, priority=priority))


WAYS = [*ANSWERS, *KEYS, "running key"]


def spoiled(how: str, priority: int = 0) -> Harness:
    """Two jobs run and three wait, one of them a job that the policy cannot bear."""
    harness = Harness(how)
    harness.say(0.0, submitted("a"), submitted("b"))
    harness.say(1.0, AssignApplied(JobId("a"), 1, 0.0), AssignApplied(JobId("b"), 1, 0.0))
    harness.say(2.0, submitted("c"))
    harness.say(3.0, submitted("poison", priority), submitted("d"))
    return harness


@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize("how", WAYS)
def test_another_policy_decides_and_nobody_who_runs_is_disturbed(how: str, priority: int) -> None:
    harness = spoiled(how, priority)
    assert [order.job for order in harness.orders] == ["a", "b"], "nobody is touched"
    harness.say(4.0, JobPaused(JobId("c")))
    for at, job in ((5.0, "a"), (6.0, "b"), (7.0, "poison"), (8.0, "d")):
        generation = harness.scheduler.jobs[JobId(job)].generation
        harness.say(at, JobFinished(JobId(job), generation))
    assert harness.assigned() == ["a", "b", "poison", "d"], "all have their turn"
    assert (harness.scheduler.policy, harness.scheduler.policy_text) == (Fifo(bypass=True), "fifo")
    assert harness.scheduler.policy_fault.startswith("policy Moody failed: ")


@pytest.mark.parametrize("how", WAYS)
def test_the_journal_leads_to_the_same_books(how: str) -> None:
    harness = spoiled(how)
    harness.say(5.0, JobFinished(JobId("a"), 1))
    harness.say(6.0, JobFinished(JobId("b"), 1))
    records = [*read_journal(harness.text.getvalue().splitlines())[1]]
    changes = [fact for record in records for fact in record.facts if isinstance(fact, PolicyChanged)]
    assert changes == [PolicyChanged("fifo", harness.scheduler.policy_fault)]
    again = opened("fifo")
    again.recover(records)
    asked = harness.scheduler.timing.planned_at  # plans that change nothing are not told
    assert again.state()._replace(planned_at=asked) == harness.scheduler.state()
    from_balance = opened("fifo")
    from_balance.restore(snapshot_from_json(snapshot_to_json(harness.scheduler.state())))
    assert from_balance.state() == harness.scheduler.state()
    assert from_balance.policy_fault == harness.scheduler.policy_fault


@pytest.mark.parametrize("how", KEYS)
def test_a_start_does_not_end_at_a_policy_that_fails_over_what_the_journal_holds(how: str) -> None:
    before = Harness("fifo")
    before.say(0.0, submitted("a"), submitted("b"), submitted("poison"), submitted("d"))
    again = opened(how)
    again.recover(read_journal(before.text.getvalue().splitlines())[1])
    again.handle(1.0, (JobFinished(JobId("a"), 1),))
    check_state(again)
    assert again.policy_text == "fifo"
    assert again.policy_fault.startswith("policy Moody failed: ")


def test_whoever_chooses_another_policy_at_the_start_gets_that_one() -> None:
    before = Harness("fifo")
    before.say(0.0, submitted("a"), submitted("poison"))
    again = opened("key")
    again.recover(read_journal(before.text.getvalue().splitlines())[1])
    again.handle(1.0, (PolicyChanged("raises later"), submitted("c")))
    assert (again.policy_text, again.policy_fault) == ("raises later", "")


def test_jobs_leave_a_queue_whose_keys_are_in_no_order() -> None:
    harness = Harness("no order")
    harness.say(0.0, *[submitted(f"job{number}") for number in range(40)])
    for number in (*range(39, 2, -3), *range(2, 38, 3)):
        harness.say(1.0, JobPaused(JobId(f"job{number}")))
    assert harness.scheduler.policy_fault.startswith("policy Moody failed: AssertionError")


def test_the_place_in_its_file_is_told_and_so_is_why_nobody_can_tell_why() -> None:
    harness = Harness("raises")
    harness.say(0.0, submitted("a"))
    told = harness.scheduler.why(harness.scheduler.jobs[JobId("a")])
    assert "no explanation (policy Moody failed: KeyError: 'a' (test_job_order.py, line " in told
    harness.say(1.0, submitted("poison"))
    assert harness.scheduler.policy_fault.startswith(
        "policy Moody failed: KeyError: 'poison' (test_job_order.py, line "
    )
    harness.say(2.0, PolicyChanged("fifo"))
    assert harness.scheduler.policy_fault == "", "whoever chooses a policy knows"


def test_without_another_policy_whoever_asked_is_told() -> None:
    scheduler = Scheduler(CLUSTER, Moody("overbooks"), find_policy=found)
    scheduler.handle(0.0, (submitted("a"), submitted("b")))
    with pytest.raises(CarpoolError):
        scheduler.handle(1.0, (submitted("poison"),))
    with pytest.raises(KeyError):
        scheduler.why(scheduler.jobs[POISON])
