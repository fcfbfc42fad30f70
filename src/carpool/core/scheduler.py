"""Scheduler: folds facts, asks the policy for a plan, and emits orders."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType

from carpool.core.constraints.pinned_jobs import plan_without_preempting
from carpool.core.constraints.policy_handover import POLICY_EXCEPTIONS, describe_policy_failure, jobs_to_release
from carpool.core.constraints.priorities import PriorityPlanner, describe_urgency
from carpool.core.constraints.resource_limits import (
    describe_foreign_use,
    describe_scatter,
    describe_shortage,
    plan_within_resources,
)
from carpool.core.constraints.validation import validate_answer
from carpool.core.errors import CarpoolError, InputError, Overbooked
from carpool.core.estimates import DeclaredEstimator, Estimator
from carpool.core.journal import SkippedItem, skipped_item
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
from carpool.core.model import DeviceId, Job, JobId, NodeId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Cadence, Plan, PlanTimer, Policy, Snapshot, placement_of
from carpool.core.reasons import Explainer
from carpool.core.state.cluster_state import ClusterState
from carpool.core.state.reconcile import orders_to_close, without_unknown
from carpool.core.state.state_snapshot import StateSnapshot
from carpool.core.topology import Cluster


def expected_rates(
    changes: Sequence[Change], jobs: dict[JobId, Job], occupancy: Occupancy, estimator: Estimator
) -> tuple[float, ...]:
    """The estimated rate of each changed job once all changes apply; 0 for one that is released."""
    after: Mapping[JobId, Job] = jobs
    if occupancy.is_shared:  # jobs that start together are neighbours of each other already
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
    """Jobs that start although only ratios of their rates are known."""
    return tuple([job for job, held, _ in changes if held is not None and not estimator.knows_scale(jobs[job].spec)])


_CHECKED = (JobSubmitted, NodeJoined, WeightChanged, LimitsChanged, PolicyChanged)  # facts that may be rejected


_NO_NAMES: Mapping[int, str] = MappingProxyType({})


class Scheduler:
    """Folds facts into the state of jobs and devices, asks the policy for plans at its cadence, and emits orders.

    It has no clock: time is the `at` of each call and never decreases. `wake_at` is when it must be called even if
    nothing happens.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        *,
        estimator: Estimator | None = None,
        cadence: Cadence | None = None,
        observers: Sequence[Observer] = (),
        find_policy: Callable[[str], Policy] | None = None,  # parses a policy's text; without it policies cannot change
        fallback: str = "",  # policy that replaces one that fails; without it the exception propagates
    ) -> None:
        self.policy = policy
        self.policy_text = ""  # of the active policy, once it has replaced the first one
        self.policy_fault = ""  # failure of the previous policy, where it was replaced for that
        self._fallback = fallback
        self._find_policy = find_policy
        self._given_cadence = cadence
        self.at = 0.0
        self.wake_at: float | None = None
        self._estimator: Estimator = estimator or DeclaredEstimator()
        self._observers = tuple(observers)
        last = find_policy(fallback) if fallback and find_policy is not None else None
        self._state = ClusterState(cluster, policy, self._estimator, last)
        self._order = self._state.order
        self._state.folds[PolicyChanged] = self._on_policy_changed
        self._ranks = PriorityPlanner(self._state.ranked)
        self.timing = PlanTimer(cadence or policy.cadence)
        self._use(policy)

    @property
    def cluster(self) -> Cluster:
        return self._state.cluster

    @property
    def jobs(self) -> Mapping[JobId, Job]:
        """Jobs that are not over, by id."""
        return self._state.jobs

    @property
    def unsettled(self) -> Collection[JobId]:
        """Jobs that, according to the reports, do not hold the devices they should."""
        return self._state.unsettled

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def num_running(self) -> int:
        return len(self._state.running_jobs)

    @property
    def drained(self) -> Collection[NodeId]:
        """Nodes that an operator took out of service."""
        return self._state.drained

    @property
    def outsiders(self) -> Mapping[DeviceId, OutsidersSeen]:
        return self._state.outsiders

    def has_seen(self, job: JobId) -> bool:
        return job in self._state.jobs or job in self._state.ended

    @property
    def ended(self) -> Mapping[JobId, Phase]:
        return self._state.ended

    def outcome(self, job: JobId) -> Phase | None:
        return self._state.ended.get(job)

    def snapshot(self) -> Snapshot:
        self._view.at = self.at
        return self._view

    def why(self, job: Job, names: Mapping[int, str] = _NO_NAMES, *, verbose: bool = False) -> str:
        """Why a job waits or holds what it holds, and what would change it; `names` of devices replace the cluster's.

        `verbose` adds the policy's figures, such as prices.
        """
        view, name_of = self.snapshot(), self.cluster.device_name
        obstacles = [describe_shortage(view, job), describe_scatter(view, job)]
        obstacles = [*filter(None, (*obstacles, describe_foreign_use(view, job, self.outsiders)))]
        order, added = self._reasons_of_policy(view, job, verbose=verbose)
        explainer = Explainer(view, order, lambda device: names.get(device) or name_of(device), self.drained)
        return "; ".join(filter(None, (explainer.explain(job, obstacles), describe_urgency(view, job), *added)))

    def _reasons_of_policy(self, view: Snapshot, job: Job, *, verbose: bool) -> tuple[Sequence[JobId], list[str]]:
        """The policy's order of the waiting jobs, and what it adds about a job."""
        policy = self.policy
        try:
            added = [str(policy.why(view, job)), str(policy.details(view, job)) if verbose else ""]
            return policy.start_order(view), added
        except POLICY_EXCEPTIONS as error:
            if not self._fallback:
                raise
            return tuple(view.waiting), [f"no explanation ({describe_policy_failure(policy, error)})"]

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self._state.check()

    def add_observer(self, observer: Observer) -> None:
        self._observers = (*self._observers, observer)

    def handle(self, at: float, facts: Sequence[Fact]) -> list[Order]:
        """Fold the facts of one instant, then plan at most once; returns the orders.

        A policy that raises changes nothing. With a `fallback`, that policy replaces it and plans at the same instant;
        without one the exception propagates.
        """
        if at < self.at:
            raise CarpoolError(f"facts of {at} s were handled after facts of {self.at} s; time must not decrease")
        another: Policy | None = None
        if self._state.ranked:
            facts = [*self._ranks.missed(self._state.jobs, self.at, at, facts), *facts]
        if len(facts) > 1:
            self._state.refuse_unusable(facts)
            another = self._new_policy(facts) if PolicyChanged in map(type, facts) else None
            facts = in_folding_order(facts)
        elif facts and type(facts[0]) in _CHECKED:
            self._state.refuse_unusable(facts)
            another = self._new_policy(facts) if type(facts[0]) is PolicyChanged else None
        self.at = at
        orders: list[Order] = []
        ignored: Sequence[Fact] = ()
        places = self._fold(at, facts, orders)
        if another is not None:
            self._order.use(another)
            self._use(another)
        if places:
            ignored = [facts[place] for place in places]
            facts = [fact for place, fact in enumerate(facts) if place not in places]
        followed = self._state.followed
        if followed:
            facts = [*facts, *followed]
            followed.clear()
        planned = None
        try:
            if self._ranks.is_due(at):
                self.timing.is_triggered = True
            if (self.timing.may_be_due or self._ranks.is_waiting) and not self._order.fault:
                planned = None if self._has_taken_over else self._take_over(at, orders)
                if planned is None and (
                    self._ranks.is_partial or self.timing.is_due(at, has_jobs=bool(self._state.jobs))
                ):
                    planned = self._decide(at, orders)
                self.wake_at = self._next_wake(at)
        finally:  # facts are recorded even when the policy raises
            if self._observers:
                record = Record(at, facts, planned, ignored)
                for observer in self._observers:
                    observer.record(record)
        return [*orders, *self._fall_back(at)] if self._order.fault else orders

    def recover(
        self, records: Iterable[Record], *, has_gaps: bool = False, skipped: list[SkippedItem] | None = None
    ) -> list[Order]:
        """Fold records without asking the policy again; returns the orders that may have been lost.

        The scheduler must be made with the last recorded policy. Where records are missing (`has_gaps`), plans for
        unknown jobs and devices are skipped. With `skipped`, so is everything that cannot be folded, and listed there.
        """
        for record in records:
            self.at = record.at if skipped is None else max(self.at, record.at)
            if skipped is None:
                self._fold(self.at, record.facts, [])
                self._refold_plan(record.planned, has_gaps=has_gaps)
            else:
                has_gaps = has_gaps or bool(skipped)
                self._refold_usable(record, skipped, has_gaps=has_gaps)
        self._state.followed.clear()
        if self._order.fault:  # reported with the first fact
            self._use(self._order.policy)
        self.timing.is_triggered = True
        self.wake_at = self._next_wake(self.at)
        return orders_to_close(self._state.jobs.values())

    def _refold_plan(self, planned: Planned | None, *, has_gaps: bool) -> None:
        if planned is None:
            return
        if has_gaps:
            planned = without_unknown(planned, self._state.jobs, self.cluster.num_devices)
        try:
            self._state.occupy(planned.changes, most=inf)  # it was allowed when recorded
        except Overbooked:
            if not has_gaps:
                raise
            return
        self._state.adopt(self.at, planned, [])
        self._remember(self.at, planned)

    def _refold_usable(self, record: Record, skipped: list[SkippedItem], *, has_gaps: bool) -> None:
        """Fold what can be folded of a record; the rest is listed with the job it is about."""
        for fact in record.facts:
            try:
                self._fold(self.at, (fact,), [])
            except Exception as error:  # noqa: BLE001 - the daemon must start, whatever a journal holds
                spec = getattr(fact, "spec", None)
                skipped.append(skipped_item(getattr(fact, "job", "") if spec is None else spec.id, error))
        try:
            self._refold_plan(record.planned, has_gaps=has_gaps or bool(skipped))
        except Exception as error:  # noqa: BLE001 - likewise
            changes = () if record.planned is None else record.planned.changes
            skipped += [skipped_item(change.job, error) for change in changes]

    def state(self) -> StateSnapshot:
        """The complete state between two calls of `handle`, to restart from."""
        view = self._view
        return self._state.as_snapshot()._replace(
            at=self.at,
            planned_at=self.timing.planned_at,
            wake_at=self.timing.wanted_at,
            note=view.note,
            policy=self.policy_text,
            policy_fault=self.policy_fault,
        )

    def restore(self, state: StateSnapshot) -> list[Order]:
        """Start from a state instead of the records up to it; returns the orders that may have been lost.

        For a scheduler that has handled nothing yet, made with the state's cluster. Later records follow by `recover`.
        """
        self.at = state.at
        self._state.restore(state)
        self.timing.planned_at = state.planned_at
        self.timing.wanted_at = state.wake_at
        self._view.note = state.note
        self.policy_text, self.policy_fault = state.policy, state.policy_fault
        return self.recover(())

    def _fold(self, at: float, facts: Sequence[Fact], orders: list[Order]) -> Sequence[int]:
        """Fold facts in the given order; returns the positions of ignored ones."""
        timing, folds = self.timing, self._state.folds
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

    def _new_policy(self, facts: Sequence[Fact]) -> Policy | None:
        """The policy that facts switch to, the last one if several do; InputError for an unknown one."""
        another: Policy | None = None
        for fact in facts:
            if isinstance(fact, PolicyChanged):
                if self._find_policy is None:
                    raise InputError(f"policy {self.policy!r} cannot be replaced by {fact.policy!r} in this run")
                another = self._find_policy(fact.policy)
        return another

    def _on_policy_changed(self, at: float, fact: PolicyChanged, orders: list[Order]) -> bool:
        self.policy_text, self.policy_fault = fact.policy, fact.fault
        self._view.note = None
        self.timing.reset()
        return True

    def _fall_back(self, at: float) -> list[Order]:
        return self.handle(at, (PolicyChanged(self._fallback, self._order.fault),))

    def _use(self, policy: Policy) -> None:
        self.policy = policy
        self.timing.cadence = self._given_cadence or policy.cadence
        self._has_taken_over = False
        state = self._state
        self._view = Snapshot(policy, state.occupancy, state.jobs, state.waiting, state.running_jobs, self._estimator)

    def _next_wake(self, at: float) -> float | None:
        if self._ranks.is_partial:
            return at
        wanted, pressing = self.timing.next_at(at, has_jobs=bool(self._state.jobs)), self._ranks.next_at
        if wanted is None or pressing is None:
            return wanted if pressing is None else pressing
        return min(wanted, pressing)

    def _decide(self, at: float, orders: list[Order]) -> Planned | None:
        view = self._view
        view.at = at
        try:
            if self._state.ranked:
                plan = self._ranks.plan(view, self._plan_within_resources, goes_on=not self.timing.is_triggered)
            else:
                plan = self._plan_within_resources()
        except POLICY_EXCEPTIONS as error:  # nothing was changed
            if not self._order.give_up(error):
                raise
            return None
        if plan is Plan.NOTHING:
            self.timing.planned(at, None)
            return None
        if plan.drafted is not None:
            self._state.occupancy.absorb(plan.drafted)  # checked while it was drafted
        believed = expected_rates(plan.changes, self._state.jobs, self._state.occupancy, self._estimator)
        guessed = jobs_without_known_rate(plan.changes, self._state.jobs, self._estimator)
        planned = Planned(plan.reason, plan.changes, believed, plan.wake_at, plan.note, guessed)
        self._state.adopt(at, planned, orders)
        self._remember(at, planned)
        return planned

    def _take_over(self, at: float, orders: list[Order]) -> Planned | None:
        """Release jobs whose shares the new policy cannot manage, before it plans."""
        self._has_taken_over = True
        leaving = jobs_to_release(self._view)
        if not leaving:
            return None
        changes = tuple([Change(job.id, None) for job in leaving])
        self._state.occupy(changes)
        reason = f"released {len(leaving)} jobs: policy {self.policy!r} does not share devices the way they did"
        planned = Planned(reason, changes, (0.0,) * len(changes), at, None)
        self._state.adopt(at, planned, orders)
        self._remember(at, planned)
        return planned

    def _plan_within_resources(self) -> Plan:
        return plan_within_resources(self._view, self._planned_by_policy)

    def _planned_by_policy(self) -> Plan:
        """Ask the policy; a plan that was not drafted is checked by applying it."""
        plan = plan_without_preempting(self._view, self._answer_of_policy)
        if plan is not Plan.NOTHING and plan.drafted is None:
            self._state.occupy(plan.changes)
        return plan

    def _answer_of_policy(self) -> Plan:
        plan = self.policy.plan(self._view)
        validate_answer(self.policy, self.at, plan, self._state.jobs, strictly=bool(self._fallback))
        return plan

    def _remember(self, at: float, planned: Planned) -> None:
        self.timing.planned(at, planned.wake_at)
        if planned.note is not None:
            self._view.note = planned.note
