"""Policy contract: a test class for any policy, which checks each plan before it is applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from carpool.core.estimates import Estimator
from carpool.core.journal import record_from_json, record_to_json
from carpool.core.messages import RUN, Record
from carpool.core.model import Job, Kind, NodeId, Phase
from carpool.core.policy import Plan, Policy, Snapshot
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Bank, Cluster, Node
from carpool.sim.failures import ScheduledFailures
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.base import PlainWorld, World
from carpool.testing.driver import Driven, ForeignUses, UserActions, drive
from carpool.testing.rig import check_state
from carpool.testing.scenarios import CALM, TROUBLE, job
from carpool.testing.strategies import GIB, Scenario, host_limited_scenarios, random_runs, random_scenarios

_CLASS_SIDE = ("cadence", "max_virtual", "shares_devices", "keeps_running_order")


class CheckedPolicy(Policy):
    """Wraps a policy and checks each of its plans."""

    def __init__(self, policy: Policy) -> None:
        self.inner = policy
        self.num_plans = 0
        self._pristine = copy.deepcopy(policy)
        for name in _CLASS_SIDE:
            setattr(self, name, getattr(policy, name))

    def plan(self, view: Snapshot) -> Plan:
        """The wrapped policy's plan, after checking that a fresh copy makes the same one."""
        self.num_plans += 1
        before = _state(view)
        plan = self.inner.plan(view)
        assert _state(view) == before, "a policy must not change what it looks at; it works on a Draft"
        again = copy.deepcopy(self._pristine).plan(view)
        assert plan == again, (
            "the same view must give the same plan: this policy remembers something (use Plan.note), or asks a clock "
            f"or chance.\nfirst: {plan}\nagain: {again}"
        )
        check_plan(view, plan)
        return plan

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        return self._same(self.inner.waiting_key(job, estimates), self.inner.waiting_key(job, estimates), job)

    def running_key(self, job: Job, estimates: Estimator) -> Any:
        return self._same(self.inner.running_key(job, estimates), self.inner.running_key(job, estimates), job)

    def _same(self, key: Any, again: Any, job: Job) -> Any:
        assert key == again, f"the key of {job.id} must stay the same while its record does: {key} and {again}"
        return key


def check_plan(view: Snapshot, plan: Plan) -> None:
    """Assert that a plan is valid and has a readable reason."""
    changed = [change.job for change in plan.changes]
    assert len(set(changed)) == len(changed), f"a plan changes each job once: {changed}"
    for change in plan.changes:
        job = view.jobs.get(change.job)
        assert job is not None, f"{change.job!r} is over, or was never submitted"
        assert job.phase in (Phase.WAITING, Phase.RUNNING), f"{job.id!r} is {job.phase}: a plan must not change it"
        if change.allocation is None:
            assert job.desired is not None, f"{job.id!r} holds nothing that could be released"
            continue
        assert change.allocation != job.desired or change.purpose != RUN, f"{job.id!r} is given what it holds already"
        width = change.allocation.num_devices
        assert job.spec.narrowest <= width <= job.spec.widest, f"{job.id!r} does not take {width} devices"
        kinds = {kind for kind, _ in view.cluster.groups_of(change.allocation)}
        assert not job.spec.kinds or kinds <= set(job.spec.kinds), f"{job.id!r} does not run on {sorted(kinds)}"
    if plan.changes:
        check_reason(plan.reason)
    assert plan.wake_at is None or plan.wake_at > view.at, f"wake_at {plan.wake_at} is not after {view.at}"
    assert json.loads(json.dumps(plan.note)) == plan.note, (
        f"a note must come back from JSON as it went in (lists, not tuples; text keys): {plan.note!r}"
    )


def check_reason(reason: str) -> None:
    """Assert that a reason is one line of at least three words."""
    assert reason == reason.strip(), f"a reason neither begins nor ends with space: {reason!r}"
    assert reason.isprintable(), f"a reason is one line of plain text: {reason!r}"
    assert len(reason.split()) >= 3, f"a reason is a readable sentence, not {reason!r}"
    assert " object at 0x" not in reason, f"a reason names things, not their addresses: {reason!r}"


def _state(view: Snapshot) -> tuple[object, ...]:
    """Everything a policy could have changed, by value."""
    occupancy = view.occupancy
    masks = [occupancy.free_mask(node.id) for node in occupancy.cluster.nodes]
    residents = [occupancy.residents(device) for device in range(occupancy.cluster.num_devices)]
    kept = copy.deepcopy(view.note)
    return view.at, dict(view.jobs), list(view.waiting), list(view.running_jobs), masks, residents, kept


class PolicyContract:
    """What every policy promises. Inherit, and set `policy` or override `make_policy`.

    After every decision the state is checked (nothing overbooked, nothing lost); every plan is requested twice, and its
    reason, note and changes are checked; at the end every job is over, in time.
    """

    policy: ClassVar[Policy | None] = None
    examples: ClassVar[int] = 25  # random runs of each sort
    max_jobs: ClassVar[int] = 8  # in a random run
    patience: ClassVar[float] = 10.0  # a run ends within this many times the time of its jobs one after another
    shrinks: ClassVar[bool] = True  # whether a failing run is made as small as possible, which takes a while
    widest: ClassVar[int] = 0  # devices of the widest job it serves, others are made narrower; 0: any

    def make_policy(self) -> Policy:
        assert self.policy is not None, f"{type(self).__name__} sets `policy` or overrides `make_policy`"
        return copy.deepcopy(self.policy)

    def make_world(self) -> World:
        """The world to simulate; override it for a policy that needs another."""
        return PlainWorld()

    @pytest.mark.parametrize("name", CALM)
    def test_finishes_every_job(self, name: str) -> None:
        ground = CALM[name]
        run = self.run(ground)
        for arrival in ground.arrivals:
            outcome = run.outcome(arrival.spec.id)
            assert outcome is Phase.FINISHED, f"{arrival.spec.id} is {outcome}:\n{run.story(arrival.spec.id)}"

    @pytest.mark.parametrize("name", TROUBLE)
    def test_survives_trouble(self, name: str) -> None:
        """All jobs end although nodes are lost and come back, jobs crash, and users cancel and pause."""
        self.run(TROUBLE[name])

    @pytest.mark.parametrize("name", ["all at once", "elastic jobs", "several device types"])
    def test_survives_costs_and_reports(self, name: str) -> None:
        """All jobs end when starts and moves take time, crashes lose work, and jobs report."""
        self.run(CALM[name], PlainWorld(checkpoint_every=2.0, start_s=0.5, resize_s=0.5), report_every_s=1.5)

    def test_does_nothing_with_nothing(self) -> None:
        policy = self.make_policy()
        scheduler = Scheduler(Cluster.build([(1, 2, "V100")]), policy, estimator=self.make_world().estimator())
        plan = policy.plan(scheduler.snapshot())
        check_plan(scheduler.snapshot(), plan)
        assert plan.changes == ()

    def test_keeps_to_what_jobs_insist_on(self) -> None:
        """Device memory is not exceeded, and the share of an exact job does not change."""
        small = Node(NodeId(0), "n0", (Bank(Kind("K80"), range(2), 8 * GIB),))
        large = Node(NodeId(1), "n1", (Bank(Kind("V100"), range(2, 4), 16 * GIB),))
        wanted = [job("big"), job("any", 2), job("exact", at=1.0), job("more", at=1.5), job("last", 2, at=2.0)]
        asked = [
            Arrival(at, replace(spec, memory_bytes=12 * GIB if spec.id == "big" else 3 * GIB, exact=spec.id == "exact"))
            for at, spec in wanted
        ]
        run = self.run(Scenario(Cluster((small, large)), asked))
        shares = {
            share.fraction
            for _, order in run.orders
            if order.job == "exact" and (allocation := getattr(order, "allocation", None)) is not None
            for share in allocation.shares
        }
        assert len(shares) == 1, f"the exact job ran with shares {sorted(shares)}"

    def test_same_run_twice(self) -> None:
        ground = TROUBLE["a node is lost and comes back"]
        assert self.run(ground).records == self.run(ground).records

    @pytest.mark.parametrize("name", ["all at once", "elastic jobs"])
    def test_decides_the_same_after_a_restart(self, name: str) -> None:
        ground = CALM[name]
        records = [_through_json(record) for record in self.run(ground).records]
        for index, record in enumerate(records):
            if record.planned is None:
                continue
            observer = _RecordList()
            estimator = self.make_world().estimator()
            recovered = Scheduler(ground.cluster, self.make_policy(), estimator=estimator, observers=(observer,))
            recovered.recover(records[:index])
            recovered.handle(record.at, record.facts)
            assert observer.records[0].planned == record.planned, f"record {index}, at {record.at} s"

    def test_random_runs(self) -> None:
        """Any feasible trace on any cluster: all jobs finish in time."""
        self._try(self._run_to_finish, trouble=False)

    def test_random_trouble(self) -> None:
        """Any feasible trace with losses, crashes, cancels and pauses: all jobs end."""

        def check(ground: Scenario) -> None:
            self.run(ground)

        self._try(check, trouble=True)

    def test_keeps_to_host_resources(self) -> None:
        scenarios = host_limited_scenarios(self.max_jobs)
        random_runs(scenarios, self._run_to_finish, self.examples, shrinks=self.shrinks)

    def _run_to_finish(self, ground: Scenario) -> None:
        run = self.run(ground)
        for arrival in ground.arrivals:
            assert run.outcome(arrival.spec.id) is Phase.FINISHED, run.story(arrival.spec.id)

    def _try(self, check: Callable[[Scenario], None], *, trouble: bool) -> None:
        random_runs(random_scenarios(self.max_jobs, trouble=trouble), check, self.examples, shrinks=self.shrinks)

    def run(self, ground: Scenario, world: World | None = None, report_every_s: float = 0.0) -> Driven:
        """Simulate, checking the state after every decision; assert that every job ends in time."""
        policy = CheckedPolicy(self.make_policy())
        ground = replace(ground, arrivals=[self._narrowed(arrival) for arrival in ground.arrivals])
        run = drive(
            policy,
            ground.cluster,
            ground.arrivals,
            world or self.make_world(),
            failures=(ScheduledFailures(ground.mishaps), UserActions(ground.actions), ForeignUses(ground.visits)),
            report_every_s=report_every_s,
            check=check_state,
            max_records=5_000,
        )
        for left in run.scheduler.jobs:
            pytest.fail(f"{left} never ended; it is {run.scheduler.jobs[left].phase}:\n{run.story(left)}")
        last, limit = run.records[-1].at, self._limit(ground, policy)
        assert last <= limit, f"the last job ended at {last} s, although {limit} s are {self.patience} times enough"
        return run

    def _narrowed(self, arrival: Arrival) -> Arrival:
        spec = arrival.spec
        if not self.widest or spec.devices <= self.widest:
            return arrival
        narrowest, widest = min(spec.min_devices, self.widest), spec.max_devices and max(spec.max_devices, self.widest)
        return arrival._replace(spec=replace(spec, devices=self.widest, min_devices=narrowest, max_devices=widest))

    def _limit(self, ground: Scenario, policy: Policy) -> float:
        """When all jobs must be over: a multiple of running them one after another, from the last event on."""
        last = max(
            [arrival.submit_s for arrival in ground.arrivals]
            + [mishap.at_s for mishap in ground.mishaps]
            + [action.at_s for action in ground.actions]
            + [visit.until_s for visit in ground.visits]
        )
        alone = sum((arrival.spec.work or 0.0) + 1.0 for arrival in ground.arrivals)
        pause = max(policy.cadence.round_s, policy.cadence.min_interval_s)
        return last + self.patience * (alone + pause * (len(ground.arrivals) + 2))


class _RecordList:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)


def _through_json(record: Record) -> Record:
    return record_from_json(json.loads(json.dumps(record_to_json(record))))
