"""What users change at run time is folded, obeyed, told and recovered; and another policy takes over what it finds."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.backends.job_accounting import JobAccounting
from carpool.core.errors import InputError, UnknownName
from carpool.core.job_history import job_history
from carpool.core.journal import record_from_json, record_to_json
from carpool.core.messages import (
    Assign,
    Fact,
    JobCancelled,
    JobFinished,
    JobSubmitted,
    LimitsChanged,
    PolicyChanged,
    Record,
    Release,
    ResumabilityChanged,
    WeightChanged,
)
from carpool.core.metrics import Metrics
from carpool.core.model import Allocation, JobId, JobSpec, Phase
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import StateSnapshot, snapshot_from_json, snapshot_to_json
from carpool.core.topology import Cluster
from carpool.policies.registry import parse_policy
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.testing.rig import FakeBackend, check_state

CLUSTER = Cluster.build([(1, 4, "V100")])
A, B, C = JobId("a"), JobId("b"), JobId("c")


class Harness:
    """A scheduler that can change its policy, its records, and a backend that answers at once."""

    def __init__(self, policy: str = "wsrtf") -> None:
        self.records: list[Record] = []
        self.metrics, self.ledger, self.spans = Metrics(CLUSTER), JobAccounting(CLUSTER), AllocationHistory(CLUSTER)
        self.backend = FakeBackend(answers_at_once=True)
        followers = (self, self.metrics, self.ledger, self.spans)
        self.scheduler = Scheduler(CLUSTER, parse_policy(policy), observers=followers, find_policy=parse_policy)

    def record(self, record: Record) -> None:
        self.records.append(record)

    def say(self, at: float, *facts: Fact) -> list[Any]:
        orders: list[Any] = self.scheduler.handle(at, facts)
        answers = self.backend.apply(at, orders)
        if answers:
            self.scheduler.handle(at, answers)
        check_state(self.scheduler)
        return orders

    def holds(self, job: JobId) -> Allocation | None:
        return self.scheduler.jobs[job].desired


def stands(scheduler: Scheduler) -> StateSnapshot:
    """Where everything stands, but for when a policy was last asked that had nothing to say: no record tells."""
    return scheduler.state()._replace(planned_at=None, wake_at=None)


def spec(job: JobId, devices: int = 4, work: float = 100.0, **fields: Any) -> JobSubmitted:
    return JobSubmitted(JobSpec(job, devices, work, **fields))


def test_a_heavier_job_comes_first_from_then_on() -> None:
    harness = Harness("wsrtf")
    harness.say(0.0, spec(A), spec(B, work=110.0))
    assert harness.holds(A) is not None
    harness.say(1.0, WeightChanged(B, 5.0))
    assert (harness.holds(A), harness.scheduler.jobs[B].spec.weight) == (None, 5.0)
    assert harness.holds(B) is not None
    assert harness.ledger.accounts[B].spec.weight == 5.0
    harness.say(50.0, JobFinished(B, harness.scheduler.jobs[B].generation))
    assert list(harness.metrics.weights) == [5.0]
    assert "weight changed by the user to 5, including priority and quota" in [
        words for _, words in job_history(harness.records, B)
    ]


def test_who_holds_more_than_it_may_leaves_and_gets_what_it_may() -> None:
    harness = Harness("elastic")
    harness.say(0.0, spec(A, 1, min_devices=1, max_devices=4))
    before = harness.scheduler.jobs[A]
    assert before.desired == Allocation.of(0, 1, 2, 3)
    orders = harness.say(1.0, LimitsChanged(A, 1, 2))
    assert orders == [Release(A, before.generation + 1), Assign(A, Allocation.of(0, 1), before.generation + 2)]
    assert (harness.scheduler.jobs[A].spec.narrowest, harness.scheduler.jobs[A].spec.widest) == (1, 2)
    told = [words for _, words in job_history(harness.records, A)]
    assert "device limits changed to 1–2 by the user" in told


def test_who_no_longer_fits_waits_and_everybody_who_follows_knows() -> None:
    harness = Harness("fifo")
    harness.say(0.0, spec(A, 2), spec(B, 2))
    harness.say(1.0, LimitsChanged(A, 3, 4))
    assert harness.scheduler.jobs[A].phase is Phase.WAITING
    assert harness.scheduler.jobs[A].spec.devices == 3
    account = harness.ledger.accounts[A]
    assert (account.phase, account.held, account.held_s) == (Phase.WAITING, None, 1.0)
    assert [span.until for span in harness.spans.between(0.0, 9.0) if span.job == A] == [1.0, 1.0]
    assert harness.metrics.device_s == 2.0
    harness.say(2.0, JobFinished(B, harness.scheduler.jobs[B].generation))
    assert harness.holds(A) == Allocation.of(0, 1, 2)


def test_who_holds_what_it_still_may_stays() -> None:
    harness = Harness("fifo")
    harness.say(0.0, spec(A, 2))
    assert harness.say(1.0, LimitsChanged(A, 1, 2)) == []
    assert harness.holds(A) == Allocation.of(0, 1)


@pytest.mark.parametrize(
    "fact", [WeightChanged(A, 0.0), WeightChanged(A, nan), LimitsChanged(A, 0, 2), LimitsChanged(A, 3, 2)]
)
def test_what_no_job_can_have_is_refused_and_changes_nothing(fact: Fact) -> None:
    harness = Harness("fifo")
    harness.say(0.0, spec(A, 2))
    num_records = len(harness.records)
    with pytest.raises(InputError):
        harness.say(1.0, fact)
    assert len(harness.records) == num_records


def test_a_change_to_a_job_that_is_over_is_ignored() -> None:
    harness = Harness("fifo")
    harness.say(0.0, spec(A), JobCancelled(A))
    harness.say(1.0, WeightChanged(A, 2.0), LimitsChanged(A, 1, 1))
    assert harness.records[-1].ignored == [WeightChanged(A, 2.0), LimitsChanged(A, 1, 1)]


def test_another_policy_decides_from_then_on() -> None:
    harness = Harness("fifo")
    harness.say(0.0, spec(A, 4, 100.0), spec(B, 4, 50.0), spec(C, 4, 10.0))
    harness.say(1.0, PolicyChanged("srtf"))
    assert harness.holds(C) is not None, "the shortest"
    assert harness.scheduler.policy_text == "srtf"
    assert type(harness.scheduler.policy) is type(parse_policy("srtf"))
    harness.say(2.0, PolicyChanged("fifo"))
    assert harness.holds(C) is not None, "fifo moves nobody"
    harness.say(3.0, JobFinished(C, harness.scheduler.jobs[C].generation))
    assert harness.holds(A) is not None, "and goes by arrival again"


def test_a_policy_that_shares_nothing_may_follow_one_that_does() -> None:
    harness = Harness("mps-equal:slots=2")
    harness.say(0.0, *[spec(JobId(f"j{n}"), 1) for n in range(8)])
    assert harness.scheduler.num_running == 8
    harness.say(1.0, PolicyChanged("fifo"))
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (4, 4), "whole devices from then on"
    again = Scheduler(CLUSTER, parse_policy("fifo"))
    again.recover(harness.records)
    assert stands(again) == stands(harness.scheduler)
    opened = Scheduler(CLUSTER, parse_policy("fifo"))
    opened.restore(snapshot_from_json(json.loads(json.dumps(snapshot_to_json(harness.scheduler.state())))))
    assert stands(opened) == stands(harness.scheduler)


def test_a_policy_that_there_is_not_is_refused() -> None:
    harness = Harness("fifo")
    with pytest.raises(UnknownName):
        harness.say(0.0, PolicyChanged("fivo"))
    with pytest.raises(InputError, match="cannot be replaced"):
        Scheduler(CLUSTER, parse_policy("fifo")).handle(0.0, [PolicyChanged("srtf")])


JOBS = st.sampled_from([A, B, C])
HAPPENINGS = st.one_of(
    st.builds(lambda job, devices, work: ("submit", job, devices, work), JOBS, st.integers(1, 4), st.integers(1, 50)),
    st.builds(WeightChanged, JOBS, st.sampled_from([0.5, 1.0, 4.0])),
    st.builds(
        lambda job, least, more: LimitsChanged(job, least, least + more), JOBS, st.integers(1, 4), st.integers(0, 3)
    ),
    st.sampled_from(["fifo", "srtf", "wsrtf", "las", "mps-equal", "elastic"]).map(PolicyChanged),
    JOBS.map(JobCancelled),
)


@given(st.lists(HAPPENINGS, max_size=14), st.integers(0, 13))
def test_recovery_asks_no_policy_and_comes_to_the_same(happenings: list[Any], cut: int) -> None:
    harness = Harness("fifo")
    balance, behind = None, 0
    for at, what in enumerate(happenings):
        if isinstance(what, tuple):
            _, job, devices, work = what
            if job in harness.scheduler.jobs or harness.scheduler.outcome(job) is not None:
                continue
            what = spec(job, devices, float(work))
        harness.say(float(at), what)
        if at == cut:
            balance, behind = harness.scheduler.state(), len(harness.records)
    policy = parse_policy(harness.scheduler.policy_text or "fifo")
    records = [record_from_json(json.loads(json.dumps(record_to_json(record)))) for record in harness.records]
    again = Scheduler(CLUSTER, policy)
    again.recover(records)
    check_state(again)
    assert stands(again) == stands(harness.scheduler)
    if balance is not None:
        opened = Scheduler(CLUSTER, policy)
        opened.restore(balance)
        opened.recover(records[behind:])
        check_state(opened)
        assert stands(opened)._replace(running=()) == stands(harness.scheduler)._replace(running=())


def test_a_job_that_turns_out_to_keep_its_work_may_be_preempted() -> None:
    harness = Harness("wsrtf")
    harness.say(0.0, JobSubmitted(JobSpec(A, 4, 100.0, resumable=False)))
    assert harness.say(1.0, JobSubmitted(JobSpec(B, 4, 1.0, weight=8.0))) == []
    orders = harness.say(2.0, ResumabilityChanged(A, resumable=True))
    assert [(type(order), order.job) for order in orders] == [(Release, A), (Assign, B)]
    assert "keeps its work" in " ".join(words for _, words in job_history(harness.records, A))
    again = [record_from_json(json.loads(json.dumps(record_to_json(record)))) for record in harness.records]
    assert [list(record.facts) for record in again] == [list(record.facts) for record in harness.records]
