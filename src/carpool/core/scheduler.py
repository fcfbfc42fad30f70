"""Scheduler: folds facts, asks the policy for a plan, and emits orders."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from carpool.core.constraints.policy_handover import POLICY_EXCEPTIONS, describe_policy_failure, jobs_to_release
from carpool.core.constraints.priorities import PriorityPlanner, describe_urgency
from carpool.core.constraints.resource_limits import describe_foreign_use, describe_shortage, plan_within_resources
from carpool.core.constraints.validation import validate_answer
from carpool.core.errors import CarpoolError, InputError, Overbooked
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.messages import (
    Change,
    Fact,
    JobSubmitted,
    LimitsChanged,
    NodeJoined,
    Observer,
    Order,
    OutsidersSeen,
    Planned,
    PolicyChanged,
    Record,
    WeightChanged,
    in_folding_order,
)
from carpool.core.model import DeviceId, Job, JobId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Cadence, Plan, PlanTimer, Policy, Snapshot, placement_of
from carpool.core.state.cluster_state import ClusterState
from carpool.core.state.reconcile import orders_to_close, without_unknown
from carpool.core.state.state_snapshot import StateSnapshot
from carpool.core.topology import Cluster


def expected_rates(
    changes: Sequence[Change], jobs: dict[JobId, Job], occupancy: Occupancy, estimator: Estimator
) -> tuple[float, ...]:
    """The rate of each changed job, in order, once all changes hold; 0 for one that leaves."""
    after: Mapping[JobId, Job] = jobs
    if occupancy.is_shared:  # those who start together are neighbours of each other already
        after = ChainMap({job: jobs[job]._replace(desired=held) for job, held, _ in changes}, jobs)
    rates = []
    for name, held, _ in changes:
        rate = 0.0
        if held is not None:
            placement = placement_of(occupancy, after, jobs[name], held, sharing=occupancy.is_shared)
            rate = estimator.rate(jobs[name].spec, placement).mean
        rates.append(rate)
    return tuple(rates)


def jobs_without_known_rate(
    changes: Sequence[Change], jobs: Mapping[JobId, Job], estimator: Estimator
) -> tuple[JobId, ...]:
    """Jobs that start though nobody knows how fast they are."""
    return tuple([job for job, held, _ in changes if held is not None and not estimator.knows_scale(jobs[job].spec)])


_CHECKED = (JobSubmitted, NodeJoined, WeightChanged, LimitsChanged, PolicyChanged)  # facts that may be refused


class Scheduler:
    """Folds facts into the state of jobs and devices, asks the policy when its cadence says so, gives orders.

    It knows no clock: time is the `at` of each call, and never runs backwards. `wake_at` says when it wants to be
    called even if nothing happens.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        *,
        estimator: Estimator | None = None,
        cadence: Cadence | None = None,
        observers: Sequence[Observer] = (),
        find_policy: Callable[[str], Policy] | None = None,  # what a policy's text means; without it none can change
        fallback: str = "",  # the policy that takes the place of one that fails; without it the caller is told
    ) -> None:
        self.policy = policy
        self.policy_text = ""  # of a policy that has taken the place of the first one
        self.policy_fault = ""  # of the policy before, where that is why this one decides
        self._fallback = fallback
        self._find_policy = find_policy
        self._given_cadence = cadence
        self.at = 0.0
        self.wake_at: float | None = None
        self._estimator: Estimator = estimator or DeclaredEstimator()
        self._observers = tuple(observers)
        last = find_policy(fallback) if fallback and find_policy is not None else None
        self._books = ClusterState(cluster, policy, self._estimator, last)
        self._filing = self._books.filing
        self._books.folds[PolicyChanged] = self._on_policy_changed
        self._ranks = PriorityPlanner(self._books.ranked)
        self.timing = PlanTimer(cadence or policy.cadence)
        self._use(policy)

    # ---------------------------------------------------------------------------------------------------- reading
    @property
    def cluster(self) -> Cluster:
        """The nodes and devices there are."""
        return self._books.cluster

    @property
    def jobs(self) -> Mapping[JobId, Job]:
        """Jobs that are not over, by id."""
        return self._books.jobs

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._books.waiting)

    @property
    def num_running(self) -> int:
        """Jobs that hold devices."""
        return len(self._books.roster)

    @property
    def outsiders(self) -> Mapping[DeviceId, OutsidersSeen]:
        """Who else computes on which of our devices."""
        return self._books.outsiders

    def has_seen(self, job: JobId) -> bool:
        """Whether a job of this name was ever submitted."""
        return job in self._books.jobs or job in self._books.ended

    @property
    def ended(self) -> Mapping[JobId, Phase]:
        """How jobs that are over ended, by id."""
        return self._books.ended

    def outcome(self, job: JobId) -> Phase | None:
        """How a job ended; None while it has not."""
        return self._books.ended.get(job)

    def snapshot(self) -> Snapshot:
        """What a policy would see now."""
        self._view.at = self.at
        return self._view

    def why(self, job: Job) -> str:
        """Why a job stands as it does now, in one sentence for people: as its policy sees it, and what it lacks."""
        view = self.snapshot()
        try:
            told = self.policy.why(view, job)
        except POLICY_EXCEPTIONS as error:
            if not self._fallback:
                raise
            told = f"its policy cannot tell why ({describe_policy_failure(self.policy, error)})"
        words = [str(told), describe_urgency(view, job), describe_shortage(view, job)]
        words.append(describe_foreign_use(view, job, self.outsiders))
        return "; ".join(filter(None, words))

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self._books.check()

    def follow(self, observer: Observer) -> None:
        """Show an observer every record from now on, after those that were there before it."""
        self._observers = (*self._observers, observer)

    # --------------------------------------------------------------------------------------------------- handling
    def handle(self, at: float, facts: Sequence[Fact]) -> list[Order]:
        """Fold the facts of one instant, then plan at most once; the orders that follow.

        A policy that fails changes nothing, and is told of: with a `fallback`, as a change of the policy that is folded
        right behind, so that a plan is made all the same; else to the caller.
        """
        if at < self.at:
            raise CarpoolError(f"time ran backwards: facts of {at} s after those of {self.at} s")
        another: Policy | None = None
        if self._books.ranked:
            facts = [*self._ranks.missed(self._books.jobs, self.at, at, facts), *facts]
        if len(facts) > 1:
            self._books.refuse_unusable(facts)
            another = self._found_in(facts) if PolicyChanged in map(type, facts) else None
            facts = in_folding_order(facts)
        elif facts and type(facts[0]) in _CHECKED:
            self._books.refuse_unusable(facts)
            another = self._found_in(facts) if type(facts[0]) is PolicyChanged else None
        self.at = at
        orders: list[Order] = []
        ignored: Sequence[Fact] = ()
        places = self._fold(at, facts, orders)
        if another is not None:
            self._filing.use(another)
            self._use(another)
        if places:
            ignored = [facts[place] for place in places]
            facts = [fact for place, fact in enumerate(facts) if place not in places]
        followed = self._books.followed
        if followed:
            facts = [*facts, *followed]
            followed.clear()
        planned = None
        try:
            if self._ranks.is_due(at):
                self.timing.is_triggered = True
            if (self.timing.may_be_due or self._ranks.is_waiting) and not self._filing.fault:
                planned = None if self._has_taken_over else self._take_over(at, orders)
                if planned is None and self._is_due(at):
                    planned = self._decide(at, orders)
                self.wake_at = self._next_wake(at)
        finally:  # facts are kept even when a policy breaks over them
            if self._observers:
                record = Record(at, facts, planned, ignored)
                for observer in self._observers:
                    observer.record(record)
        return [*orders, *self._fall_back(at)] if self._filing.fault else orders

    def recover(self, records: Iterable[Record], *, has_gaps: bool = False) -> list[Order]:
        """Fold what was recorded without asking the policy again; the orders that may have been lost on the way.

        Of policies that took each other's place only the last is needed: it is the one this scheduler is made with.
        Where records are missing in between (`has_gaps`), what is said of jobs and devices they brought is left out.
        """
        for record in records:
            self.at = record.at
            orders: list[Order] = []
            self._fold(record.at, record.facts, orders)
            if record.planned is not None:
                planned = record.planned
                if has_gaps:
                    planned = without_unknown(planned, self._books.jobs, self.cluster.num_devices)
                try:
                    self._books.occupy(planned.changes, most=inf)  # it was allowed then
                except Overbooked:
                    if not has_gaps:
                        raise
                    continue
                self._books.adopt(record.at, planned, orders)
                self._remember(record.at, planned)
        self._books.followed.clear()
        if self._filing.fault:  # it is told of with the first fact
            self._use(self._filing.policy)
        self.timing.is_triggered = True
        self.wake_at = self._next_wake(self.at)
        return orders_to_close(self._books.jobs.values())

    def balance(self) -> StateSnapshot:
        """Where everything stands, between two calls of `handle`."""
        books, view = self._books, self._view
        return books.closed()._replace(
            at=self.at,
            planned_at=self.timing.planned_at,
            wake_at=self.timing.wanted_at,
            note=view.note,
            policy=self.policy_text,
            policy_fault=self.policy_fault,
        )

    def reopen(self, balance: StateSnapshot) -> list[Order]:
        """Begin where a balance stands, in place of the records up to it; the orders that may have been lost.

        For a scheduler that has handled nothing yet, made with the balance's cluster. Records that came after the
        balance follow by `recover`.
        """
        self.at = balance.at
        self._books.reopen(balance)
        self.timing.planned_at = balance.planned_at
        self.timing.wanted_at = balance.wake_at
        self._view.note = balance.note
        self.policy_text, self.policy_fault = balance.policy, balance.policy_fault
        return self.recover(())

    def _fold(self, at: float, facts: Sequence[Fact], orders: list[Order]) -> Sequence[int]:
        """Take facts in, in the order given; the places of those that did not count."""
        timing, folds = self.timing, self._books.folds
        triggers = timing.cadence.triggers
        ignored: list[int] | None = None
        for place, fact in enumerate(facts):
            kind = type(fact)
            if folds[kind](at, fact, orders):
                if kind in triggers:
                    timing.is_triggered = True
            else:
                ignored = [*(ignored or ()), place]
        return ignored or ()

    # --------------------------------------------------------------------------------------------------- policies
    def _found_in(self, facts: Sequence[Fact]) -> Policy | None:
        """The policy that facts name, the last one if there are several; InputError for an unknown one."""
        another: Policy | None = None
        for fact in facts:
            if isinstance(fact, PolicyChanged):
                if self._find_policy is None:
                    raise InputError(f"policy {fact.policy!r} cannot take the place of {self.policy!r} here")
                another = self._find_policy(fact.policy)
        return another

    def _on_policy_changed(self, at: float, fact: PolicyChanged, orders: list[Order]) -> bool:
        """What the policy before has noted and asked for is of no use to the next one, which is asked at once."""
        self.policy_text, self.policy_fault = fact.policy, fact.fault
        self._view.note = None
        self.timing.begin_anew()
        return True

    def _fall_back(self, at: float) -> list[Order]:
        """Let another policy decide in the place of one that failed, at the same instant."""
        return self.handle(at, (PolicyChanged(self._fallback, self._filing.fault),))

    def _use(self, policy: Policy) -> None:
        """Let a policy decide from now on."""
        self.policy = policy
        self.timing.cadence = self._given_cadence or policy.cadence
        self._has_taken_over = False
        books = self._books
        self._view = Snapshot(policy, books.occupancy, books.jobs, books.waiting, books.roster, self._estimator)

    # --------------------------------------------------------------------------------------------------- deciding
    def _is_due(self, at: float) -> bool:
        return self._ranks.is_partial or self.timing.is_due(at, has_jobs=bool(self._books.jobs))

    def _next_wake(self, at: float) -> float | None:
        if self._ranks.is_partial:
            return at
        wanted, pressing = self.timing.next_at(at, has_jobs=bool(self._books.jobs)), self._ranks.next_at
        if wanted is None or pressing is None:
            return wanted if pressing is None else pressing
        return min(wanted, pressing)

    def _decide(self, at: float, orders: list[Order]) -> Planned | None:
        view = self._view
        view.at = at
        try:
            if self._books.ranked:
                plan = self._ranks.plan(view, self._plan_within_supplies, goes_on=not self.timing.is_triggered)
            else:
                plan = self._plan_within_supplies()
        except POLICY_EXCEPTIONS as error:  # the device map is as it was
            if not self._filing.give_up(error):
                raise
            return None
        if plan is Plan.NOTHING:
            self.timing.planned(at, None)
            return None
        if plan.drafted is not None:
            self._books.occupancy.absorb(plan.drafted)  # checked while it was drafted
        believed = expected_rates(plan.changes, self._books.jobs, self._books.occupancy, self._estimator)
        guessed = jobs_without_known_rate(plan.changes, self._books.jobs, self._estimator)
        planned = Planned(plan.reason, plan.changes, believed, plan.wake_at, plan.note, guessed)
        self._books.adopt(at, planned, orders)
        self._remember(at, planned)
        return planned

    def _take_over(self, at: float, orders: list[Order]) -> Planned | None:
        """Take jobs off devices that they hold in ways the policy does not know; it is asked right after that."""
        self._has_taken_over = True
        leaving = jobs_to_release(self._view)
        if not leaving:
            return None
        changes = tuple([Change(job.id, None) for job in leaving])
        self._books.occupy(changes)
        reason = f"{len(leaving)} jobs shared devices as {self.policy!r} does not: they leave before it is asked"
        planned = Planned(reason, changes, (0.0,) * len(changes), at, None)
        self._books.adopt(at, planned, orders)
        self._remember(at, planned)
        return planned

    def _plan_within_supplies(self) -> Plan:
        return plan_within_resources(self._view, self._planned_by_policy)

    def _planned_by_policy(self) -> Plan:
        """What the policy decides; what it did not draft is on the device map then, since only that checks it."""
        plan = self.policy.plan(self._view)
        validate_answer(self.policy, self.at, plan, self._books.jobs, strictly=bool(self._fallback))
        if plan is not Plan.NOTHING and plan.drafted is None:
            self._books.occupy(plan.changes)
        return plan

    def _remember(self, at: float, planned: Planned) -> None:
        self.timing.planned(at, planned.wake_at)
        if planned.note is not None:
            self._view.note = planned.note
