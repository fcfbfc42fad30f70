"""The journal is the only durable truth: replayed and recovered schedulers are the ones that wrote it."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.backends.job_accounting import JobAccounting
from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.draft import Draft
from carpool.core.errors import JournalError
from carpool.core.journal import Header, JournalWriter, read_journal
from carpool.core.messages import Assign, JobSubmitted, NodeJoined, NodeLost, Order, Probe, Record, Release
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.state.state_snapshot import snapshot_from_json, snapshot_to_json
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.queries.allocation_history import AllocationHistory
from carpool.service.queries.event_log import EventFeed, EventLog
from carpool.sim.failures import RandomFailures, ScheduledFailures
from carpool.testing import Driven, Rig, UserActions, drive
from carpool.testing.rig import check_state
from carpool.testing.scenarios import CALM, TROUBLE
from carpool.testing.strategies import Scenario, random_scenarios


class Turns(Policy):
    """Everybody off at every fact, then on again in an order that its note turns: many orders, and state to keep."""

    def plan(self, view: Snapshot) -> Plan:
        turn = view.note if isinstance(view.note, int) else 0
        draft = Draft(view)
        for job in list(view.running()):
            draft.release(job)
        waiting = [*view.active()]
        for index in range(len(waiting)):
            draft.place(waiting[(index + turn) % len(waiting)])
        return draft.finish("everybody in turn", note=turn + 1)


class Mute(Policy):
    """Must never be asked."""

    def plan(self, view: Snapshot) -> Plan:
        pytest.fail("recovery asked the policy")


def run(ground: Scenario, policy: Policy) -> tuple[Driven, str]:
    stream = io.StringIO()
    writer = JournalWriter(stream, Header("1", "x", ground.cluster))
    failures = (ScheduledFailures(ground.mishaps), UserActions(ground.actions), RandomFailures(3, job_mtbf_s=200.0))
    driven = drive(policy, ground.cluster, ground.arrivals, failures=failures, observers=(writer,), report_every_s=7.0)
    return driven, stream.getvalue()


def state(scheduler: Scheduler) -> tuple[object, ...]:
    """All that recovery must bring back."""
    view = scheduler.snapshot()
    held = [view.occupancy.residents(device) for device in range(view.cluster.num_devices)]
    return dict(scheduler.jobs), list(view.waiting), held, view.note, view.occupancy.lost, scheduler.at


@pytest.mark.parametrize("policy", [Fifo(bypass=True), Turns()])
@settings(max_examples=15)
@given(ground=random_scenarios())
def test_same_run_same_bytes(policy: Policy, ground: Scenario) -> None:
    assert run(ground, policy)[1] == run(ground, policy)[1]


@pytest.mark.parametrize("policy", [Fifo(bypass=True), Turns()])
@settings(max_examples=15)
@given(ground=random_scenarios())
def test_same_facts_same_orders(policy: Policy, ground: Scenario) -> None:
    """Deciding again from the facts of a journal gives the orders of the first time."""
    driven, text = run(ground, policy)
    again = Scheduler(ground.cluster, policy)
    orders: list[tuple[float, Order]] = []
    for record in read_journal(text.splitlines())[1]:
        orders += [(record.at, order) for order in again.handle(record.at, record.facts)]
    assert orders == driven.orders


@pytest.mark.parametrize("policy", [Fifo(bypass=True), Turns()])
@settings(max_examples=15)
@given(ground=random_scenarios(), data=st.data())
def test_recovery_never_decides(policy: Policy, ground: Scenario, data: st.DataObject) -> None:
    """At any point of the journal the recovered state is the state that was."""
    driven, text = run(ground, policy)
    records = list(read_journal(text.splitlines())[1])
    cut = data.draw(st.integers(0, len(records)))
    lived = Scheduler(ground.cluster, policy)
    for record in driven.records[:cut]:
        lived.handle(record.at, record.facts)
    recovered = Scheduler(ground.cluster, Mute())
    orders = recovered.recover(records[:cut])
    check_state(recovered)
    assert state(recovered) == state(lived)
    pending = [job for job in lived.jobs.values() if job.applied < job.generation]
    assert [order.job for order in orders] == [job.id for job in sorted(pending, key=lambda job: job.seq)]


@pytest.mark.parametrize("policy", [Fifo(bypass=True), Turns()])
@settings(max_examples=25)
@given(ground=random_scenarios(), data=st.data())
def test_a_balance_stands_for_the_records_before_it(policy: Policy, ground: Scenario, data: st.DataObject) -> None:
    driven, text = run(ground, policy)
    records = list(read_journal(text.splitlines())[1])
    cut = data.draw(st.integers(0, len(records)), label="balance after")
    end = data.draw(st.integers(cut, len(records)), label="records until")
    lived = Scheduler(ground.cluster, policy)
    for record in driven.records[:cut]:
        lived.handle(record.at, record.facts)
    written = json.dumps(snapshot_to_json(lived.state()))
    balance = snapshot_from_json(json.loads(written))
    for record in driven.records[cut:end]:
        lived.handle(record.at, record.facts)
    reopened = Scheduler(balance.cluster, Mute())
    orders = reopened.restore(balance)
    assert reopened.state() == balance
    if end > cut:
        orders = reopened.recover(records[cut:end])
    check_state(reopened)
    assert state(reopened) == state(lived)
    pending = [job for job in lived.jobs.values() if job.applied < job.generation]
    assert [order.job for order in orders] == [job.id for job in sorted(pending, key=lambda job: job.seq)]


def test_a_balance_of_a_newer_version_is_refused() -> None:
    balance = snapshot_to_json(Scheduler(CALM["one job"].cluster, Fifo()).state())
    with pytest.raises(JournalError, match="schema 2 is not supported"):
        snapshot_from_json({**balance, "schema": 2})


@pytest.mark.parametrize("ground", [*CALM.values(), *TROUBLE.values()])
def test_a_recovered_scheduler_goes_on(ground: Scenario) -> None:
    driven, _ = run(ground, Fifo())
    half = len(driven.records) // 2
    recovered = Scheduler(ground.cluster, Fifo())
    recovered.recover(driven.records[:half])
    for record in driven.records[half:]:
        recovered.handle(record.at, record.facts)
        check_state(recovered)
    assert not recovered.jobs


def test_orders_that_may_have_been_lost_are_given_again() -> None:
    d = Rig(groups=[(1, 2, "V100")])
    first = d.say(0.0, JobSubmitted(JobSpec(JobId("a"))), JobSubmitted(JobSpec(JobId("b"))))
    d.answered(0.0)
    second = d.say(1.0, d.backend.crash("a"))
    assert first == [Assign(JobId("a"), Allocation.of(0), 1), Assign(JobId("b"), Allocation.of(1), 1)]
    assert second == [Release(JobId("a"), 2), Assign(JobId("a"), Allocation.of(0), 3)]
    recovered = Scheduler(d.scheduler.cluster, Mute())
    assert recovered.recover(d.records) == second[1:]
    assert recovered.jobs == d.scheduler.jobs


class Curious(Policy):
    """Starts whoever waits in order to measure."""

    def plan(self, view: Snapshot) -> Plan:
        draft = Draft(view)
        for job in view.waiting:
            draft.assign(view.jobs[job], Allocation.of(0), Probe(5))
        return draft.finish("how fast is it?")


def test_a_probe_that_may_have_been_lost_is_given_again_as_a_probe() -> None:
    d = Rig(Curious(), groups=[(1, 1, "V100")])
    orders = d.say(0.0, JobSubmitted(JobSpec(JobId("a"))))
    assert orders == [Assign(JobId("a"), Allocation.of(0), 1, Probe(5))]
    assert Scheduler(d.scheduler.cluster, Mute()).recover(d.records) == orders
    balance = json.loads(json.dumps(snapshot_to_json(d.scheduler.state())))
    reopened = Scheduler(d.scheduler.cluster, Mute())
    reopened.restore(snapshot_from_json(balance))
    assert reopened.recover([]) == orders
    d.answered(1.0)
    again = Scheduler(d.scheduler.cluster, Mute())
    assert again.recover(d.records) == [], "what was heard is not asked for once more"


def test_recovery_of_nothing() -> None:
    scheduler = Scheduler(CALM["one job"].cluster, Mute())
    assert scheduler.recover([]) == []
    assert scheduler.recover([Record(5.0, ())]) == []
    assert scheduler.at == 5.0


@pytest.mark.parametrize("policy", [Fifo(bypass=True), Turns()])
@settings(max_examples=15)
@given(ground=random_scenarios(), data=st.data())
def test_a_journal_with_gaps_is_still_folded(policy: Policy, ground: Scenario, data: st.DataObject) -> None:
    """Whatever is missing, the rest is folded, followers hold out, and once all nodes were lost the books are sound."""
    driven, _ = run(ground, policy)
    lost = data.draw(st.sets(st.integers(0, len(driven.records) - 1), max_size=5))
    records = [record for place, record in enumerate(driven.records) if place not in lost]
    again = Scheduler(ground.cluster, policy)
    again.recover(records, has_gaps=True)
    again.check()
    nodes = again.cluster.nodes
    lost_nodes = again.snapshot().occupancy.lost
    again.handle(again.at, [NodeLost(node.id) for node in nodes if node.id not in lost_nodes])
    again.handle(again.at, [NodeJoined(node.name) for node in nodes])
    check_state(again)
    followers = (
        JobAccounting(again.cluster),
        AllocationHistory(again.cluster),
        OnlineEstimator(again.cluster),
        EventLog(EventFeed()),
    )
    for record in records:
        for follower in followers:
            follower.record(record)
    assert set(again.jobs) <= set(followers[0].accounts)
