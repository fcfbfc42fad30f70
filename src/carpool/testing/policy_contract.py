"""The contract of a policy: a class of tests that any policy inherits."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest

from carpool.core.journal import record_from_json, record_to_json
from carpool.core.messages import Record
from carpool.core.model import Kind, NodeId, Phase
from carpool.core.policy import Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Bank, Cluster, Node
from carpool.sim.failures import AtTimes
from carpool.sim.traces.trace import Arrival
from carpool.sim.world import PlainWorld, World
from carpool.testing.invariants import check_books
from carpool.testing.questioning import Questioned, check_plan
from carpool.testing.running import Driven, Visits, Wishes, drive
from carpool.testing.scenarios import CALM, TROUBLE, job
from carpool.testing.strategies import GIB, Ground, grounds, random_runs, supplied_grounds


class PolicyContract:
    """What every policy promises. Inherit, and set `policy` or override `make_policy`.

    After every decision the books are checked (nothing overbooked, nothing lost), every plan is asked for twice, and
    its reason, its note and its changes are looked at; at the end every job is over, in time.
    """

    policy: ClassVar[Policy | None] = None
    examples: ClassVar[int] = 25  # random runs of each sort
    max_jobs: ClassVar[int] = 8  # in a random run
    patience: ClassVar[float] = 10.0  # all ends within this many times the time of one job after another
    shrinks: ClassVar[bool] = True  # whether a failing run is made as small as possible, which takes a while
    widest: ClassVar[int] = 0  # devices of the widest job it serves, others are made narrower; 0: any

    def make_policy(self) -> Policy:
        """The policy under test; a new copy each time."""
        assert self.policy is not None, f"{type(self).__name__} sets `policy` or overrides `make_policy`"
        return copy.deepcopy(self.policy)

    def make_world(self) -> World:
        """The truth that runs are simulated in; override it for a policy that needs a world of its own."""
        return PlainWorld()

    # ------------------------------------------------------------------------------------------------- fixed runs
    @pytest.mark.parametrize("name", CALM)
    def test_finishes_every_job(self, name: str) -> None:
        """On small clusters of every shape all jobs finish, and in time."""
        ground = CALM[name]
        run = self.run(ground)
        for arrival in ground.arrivals:
            outcome = run.outcome(arrival.spec.id)
            assert outcome is Phase.FINISHED, f"{arrival.spec.id} is {outcome}:\n{run.story(arrival.spec.id)}"

    @pytest.mark.parametrize("name", TROUBLE)
    def test_survives_trouble(self, name: str) -> None:
        """Nodes come and go, jobs crash, users change their minds: nobody is forgotten."""
        self.run(TROUBLE[name])

    @pytest.mark.parametrize("name", ["all at once", "elastic jobs", "unlike kinds"])
    def test_survives_costs_and_reports(self, name: str) -> None:
        """Starts and moves cost time, crashes cost work, and jobs report as they go."""
        self.run(CALM[name], PlainWorld(checkpoint_every=2.0, start_s=0.5, resize_s=0.5), report_every_s=1.5)

    def test_does_nothing_with_nothing(self) -> None:
        """An empty cluster needs no changes."""
        policy = self.make_policy()
        scheduler = Scheduler(Cluster.build([(1, 2, "V100")]), policy, estimator=self.make_world().estimator())
        plan = policy.plan(scheduler.snapshot())
        check_plan(scheduler.snapshot(), plan)
        assert plan.changes == ()

    def test_keeps_to_what_jobs_insist_on(self) -> None:
        """Memory that a device does not have is not promised, and the share of an exact job stays what it was."""
        small = Node(NodeId(0), "n0", (Bank(Kind("K80"), range(2), 8 * GIB),))
        large = Node(NodeId(1), "n1", (Bank(Kind("V100"), range(2, 4), 16 * GIB),))
        wanted = [job("big"), job("any", 2), job("exact", at=1.0), job("more", at=1.5), job("last", 2, at=2.0)]
        asked = [
            Arrival(at, replace(spec, memory_bytes=12 * GIB if spec.id == "big" else 3 * GIB, exact=spec.id == "exact"))
            for at, spec in wanted
        ]
        run = self.run(Ground(Cluster((small, large)), asked))
        shares = {
            share.fraction
            for _, order in run.orders
            if order.job == "exact" and (allocation := getattr(order, "allocation", None)) is not None
            for share in allocation.shares
        }
        assert len(shares) == 1, f"the exact job ran with shares {sorted(shares)}"

    def test_same_run_twice(self) -> None:
        """Equal runs give equal records."""
        ground = TROUBLE["a node is lost and comes back"]
        assert self.run(ground).records == self.run(ground).records

    @pytest.mark.parametrize("name", ["all at once", "elastic jobs"])
    def test_decides_the_same_after_a_restart(self, name: str) -> None:
        """A scheduler recovered from the journal makes the plan that the old one would have made."""
        ground = CALM[name]
        records = [_through_json(record) for record in self.run(ground).records]
        for index, record in enumerate(records):
            if record.planned is None:
                continue
            heard = _Heard()
            estimator = self.make_world().estimator()
            recovered = Scheduler(ground.cluster, self.make_policy(), estimator=estimator, observers=(heard,))
            recovered.recover(records[:index])
            recovered.handle(record.at, record.facts)
            assert heard.records[0].planned == record.planned, f"record {index}, at {record.at} s"

    # ------------------------------------------------------------------------------------------------ random runs
    def test_random_runs(self) -> None:
        """Any feasible trace on any cluster: all jobs finish, in time."""

        def check(ground: Ground) -> None:
            run = self.run(ground)
            for arrival in ground.arrivals:
                assert run.outcome(arrival.spec.id) is Phase.FINISHED, run.story(arrival.spec.id)

        self._try(check, trouble=False)

    def test_random_trouble(self) -> None:
        """Any feasible trace with losses, crashes, cancels and pauses: all jobs are over at the end."""

        def check(ground: Ground) -> None:
            self.run(ground)

        self._try(check, trouble=True)

    def test_keeps_to_supplies(self) -> None:
        """Whatever jobs ask for of cores, RAM and disk: no node ever gives away more than it has, and all finish."""

        def check(ground: Ground) -> None:
            run = self.run(ground)
            for arrival in ground.arrivals:
                assert run.outcome(arrival.spec.id) is Phase.FINISHED, run.story(arrival.spec.id)

        random_runs(supplied_grounds(self.max_jobs), check, self.examples, shrinks=self.shrinks)

    def _try(self, check: Callable[[Ground], None], *, trouble: bool) -> None:
        random_runs(grounds(self.max_jobs, trouble=trouble), check, self.examples, shrinks=self.shrinks)

    # ----------------------------------------------------------------------------------------------------- inside
    def run(self, ground: Ground, world: World | None = None, report_every_s: float = 0.0) -> Driven:
        """Simulate, checking the books after every decision; assert that every job ends, and in time."""
        policy = Questioned(self.make_policy())
        ground = replace(ground, arrivals=[self._narrowed(arrival) for arrival in ground.arrivals])
        run = drive(
            policy,
            ground.cluster,
            ground.arrivals,
            world or self.make_world(),
            failures=(AtTimes(ground.mishaps), Wishes(ground.wishes), Visits(ground.visits)),
            report_every_s=report_every_s,
            check=check_books,
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

    def _limit(self, ground: Ground, policy: Policy) -> float:
        """When all must be over: some multiple of running one job after another, once nothing new happens."""
        last = max(
            [arrival.submit_s for arrival in ground.arrivals]
            + [mishap.at_s for mishap in ground.mishaps]
            + [wish.at_s for wish in ground.wishes]
            + [visit.until_s for visit in ground.visits]
        )
        alone = sum((arrival.spec.work or 0.0) + 1.0 for arrival in ground.arrivals)
        pause = max(policy.cadence.round_s, policy.cadence.min_interval_s)
        return last + self.patience * (alone + pause * (len(ground.arrivals) + 2))


class _Heard:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)


def _through_json(record: Record) -> Record:
    """A record as it comes back from a journal."""
    return record_from_json(json.loads(json.dumps(record_to_json(record))))
