"""Facts in, orders out: the one mutable root of the core."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor
from typing import Any

from carpool.core import lifecycle
from carpool.core.errors import CarpoolError, InputError, Overbooked
from carpool.core.estimates import Declared, Estimator
from carpool.core.lifecycle import Step
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Change,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Order,
    Planned,
    ProgressReported,
    Record,
    Release,
    ReleaseApplied,
    Woke,
    in_folding_order,
)
from carpool.core.model import Job, JobId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Cadence, Plan, Policy, Snapshot, placement_of, service_at
from carpool.core.ports import Observer
from carpool.core.queue import Queue, Roster
from carpool.core.reconcile import counts, orders_to_close
from carpool.core.topology import Cluster, Node

_CHECKED = (JobSubmitted, NodeJoined)  # facts that may be refused


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
    ) -> None:
        self.policy = policy
        self.cadence = cadence or policy.cadence
        self._may_share = policy.shares_devices or policy.max_virtual > 1.0
        self.at = 0.0
        self.wake_at: float | None = None
        self._estimator: Estimator = estimator or Declared()
        self._observers = tuple(observers)
        self._jobs: dict[JobId, Job] = {}
        self._ended: dict[JobId, Phase] = {}
        self._dependents: dict[JobId, list[JobId]] = {}
        self._followed: list[Fact] = []  # failures that follow from the facts being folded
        self._num_submitted = 0
        self._occupancy = Occupancy(cluster)
        self._waiting = Queue()
        self._roster = Roster(ordered=policy.keeps_running_order)
        self._view = Snapshot(policy, self._occupancy, self._jobs, self._waiting, self._roster, self._estimator)
        self._is_triggered = False
        self._planned_at: float | None = None
        self._plan_wake_at: float | None = None
        self._folds: dict[type[Fact], Callable[[float, Any, list[Order]], bool]] = {
            JobSubmitted: self._on_submitted,
            JobCancelled: self._on_cancelled,
            JobPaused: self._on_paused,
            JobResumed: self._on_resumed,
            AssignApplied: self._on_assign_applied,
            ReleaseApplied: self._on_release_applied,
            ProgressReported: self._on_progress,
            JobFinished: self._on_finished,
            JobFailed: self._on_failed,
            JobCrashed: self._on_crashed,
            NodeJoined: self._on_node_joined,
            NodeLost: self._on_node_lost,
            Woke: lambda at, fact, orders: True,
        }

    # ---------------------------------------------------------------------------------------------------- reading
    @property
    def cluster(self) -> Cluster:
        """The nodes and devices there are."""
        return self._occupancy.cluster

    @property
    def jobs(self) -> Mapping[JobId, Job]:
        """Jobs that are not over, by id."""
        return self._jobs

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs that hold devices."""
        return len(self._roster)

    def outcome(self, job: JobId) -> Phase | None:
        """How a job ended; None while it has not."""
        return self._ended.get(job)

    def snapshot(self) -> Snapshot:
        """What a policy would see now."""
        self._view.at = self.at
        return self._view

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        held: dict[JobId, Job] = {key: job for key, job in self._jobs.items() if job.desired is not None}
        assert set(self._roster) == set(held), "the roster lists exactly the jobs that hold devices"
        waiting = {key for key, job in self._jobs.items() if job.phase is Phase.WAITING}
        assert set(self._waiting) == waiting, "the queue lists exactly the waiting jobs"
        fresh = Occupancy(self.cluster)
        for node in self._occupancy.lost:
            fresh.lose(self.cluster.nodes[node])
        for job in held.values():
            assert job.desired is not None
            fresh.take(job.spec, job.desired, self.policy.max_virtual)
        assert fresh.free_devices == self._occupancy.free_devices, "free devices are what nobody holds"

    # --------------------------------------------------------------------------------------------------- handling
    def handle(self, at: float, facts: Sequence[Fact]) -> list[Order]:
        """Fold the facts of one instant, then plan at most once; the orders that follow."""
        if at < self.at:
            raise CarpoolError(f"time ran backwards: facts of {at} s after those of {self.at} s")
        if len(facts) > 1:
            self._refuse_unusable(facts)
            facts = in_folding_order(facts)
        elif facts and type(facts[0]) in _CHECKED:
            self._refuse_unusable(facts)
        self.at = at
        orders: list[Order] = []
        ignored: Sequence[Fact] = ()
        places = self._fold(at, facts, orders)
        if places:
            ignored = [facts[place] for place in places]
            facts = [fact for place, fact in enumerate(facts) if place not in places]
        if self._followed:
            facts = [*facts, *self._followed]
            self._followed.clear()
        planned = None
        try:
            if self._is_triggered or self._plan_wake_at is not None or self.cadence.round_s:
                if self._is_due(at):
                    planned = self._decide(at, orders)
                self.wake_at = self._next_wake(at)
        finally:  # facts are kept even when a policy breaks over them
            if self._observers:
                record = Record(at, facts, planned, ignored)
                for observer in self._observers:
                    observer.record(record)
        return orders

    def recover(self, records: Iterable[Record]) -> list[Order]:
        """Fold what was recorded without asking the policy again; the orders that may have been lost on the way."""
        for record in records:
            self.at = record.at
            orders: list[Order] = []
            self._fold(record.at, record.facts, orders)
            if record.planned is not None:
                self._occupy(record.planned.changes)
                self._adopt(record.at, record.planned, orders)
                self._remember(record.at, record.planned)
        self._followed.clear()
        self._is_triggered = True
        self.wake_at = self._next_wake(self.at)
        return orders_to_close(self._jobs.values())

    def _refuse_unusable(self, facts: Sequence[Fact]) -> None:
        """InputError, with nothing changed yet, for what can be no fact: a second job of one name, an empty node."""
        new: set[JobId] = set()
        for fact in facts:
            if type(fact) is JobSubmitted:
                name = fact.spec.id
                if name in self._jobs or name in self._ended or name in new:
                    raise InputError(f"job {name!r} exists already", way_out="Give every job a name of its own.")
                if len(facts) > 1:
                    new.add(name)
            elif type(fact) is NodeJoined and not fact.banks and self._node_named(fact.name) is None:
                raise InputError(f"node {fact.name!r} is new but brings no devices", way_out="Name its banks.")

    def _fold(self, at: float, facts: Sequence[Fact], orders: list[Order]) -> Sequence[int]:
        """Take facts in, in the order given; the places of those that did not count."""
        triggers = self.cadence.triggers
        folds = self._folds
        ignored: list[int] | None = None
        for place, fact in enumerate(facts):
            kind = type(fact)
            if folds[kind](at, fact, orders):
                if kind in triggers:
                    self._is_triggered = True
            else:
                ignored = [*(ignored or ()), place]
        return ignored or ()

    # --------------------------------------------------------------------------------------------------- deciding
    def _is_due(self, at: float) -> bool:
        round_s = self.cadence.round_s
        if round_s:
            begun = _round_at(at, round_s)
            is_new = self._planned_at is None or _round_at(self._planned_at, round_s) < begun
            return bool(self._jobs) and is_new and begun * round_s == at
        if self._plan_wake_at is not None and at >= self._plan_wake_at:
            return True
        if not self._is_triggered:
            return False
        return self._planned_at is None or at >= self._planned_at + self.cadence.min_interval_s

    def _next_wake(self, at: float) -> float | None:
        round_s = self.cadence.round_s
        if round_s:
            return (_round_at(at, round_s) + 1) * round_s if self._jobs else None
        if self._is_triggered and self._planned_at is not None:
            put_off = self._planned_at + self.cadence.min_interval_s
            return put_off if self._plan_wake_at is None else min(put_off, self._plan_wake_at)
        return self._plan_wake_at

    def _decide(self, at: float, orders: list[Order]) -> Planned | None:
        view = self._view
        view.at = at
        plan = self.policy.plan(view)
        if plan.wake_at is not None and plan.wake_at <= at:
            raise CarpoolError(
                f"policy {self.policy!r} asks at {at} s to be woken at {plan.wake_at} s, which is not later"
            )
        if plan is Plan.NOTHING:
            self._is_triggered = False
            self._planned_at = at
            self._plan_wake_at = None
            return None
        if not self._may_share:
            self._refuse_sharing(plan.changes)
        if plan.drafted is not None:
            self._occupancy.absorb(plan.drafted)  # checked while it was drafted
        else:
            self._occupy(plan.changes)
        jobs = self._foreseen(plan.changes) if self._occupancy.is_shared else self._jobs
        believed = tuple([self._believed_rate(change, jobs) for change in plan.changes])
        planned = Planned(plan.reason, plan.changes, believed, plan.wake_at, plan.note)
        self._adopt(at, planned, orders)
        self._remember(at, planned)
        return planned

    def _refuse_sharing(self, changes: Sequence[Change]) -> None:
        """A policy that shares devices must say so: backends look for neighbours only then."""
        for _, allocation, _ in changes:
            if allocation is not None and allocation.shares[0].fraction != 1.0:
                raise CarpoolError(
                    f"policy {self.policy!r} gives out {allocation.shares[0].fraction:g} of a device but does not set "
                    "shares_devices = True"
                )

    def _remember(self, at: float, planned: Planned) -> None:
        self._is_triggered = False
        self._planned_at = at
        self._plan_wake_at = planned.wake_at
        if planned.note is not None:
            self._view.note = planned.note

    def _adopt(self, at: float, planned: Planned, orders: list[Order]) -> None:
        """Make a plan's changes the desired state; the device map has them already."""
        cluster = self._occupancy.cluster
        for change, rate in zip(planned.changes, planned.believed, strict=True):
            job = self._jobs[change.job]
            service = service_at(cluster, job, at)
            if change.allocation is None:
                job = lifecycle.moved(job, at, Step.RELEASE, service, "was released")
                orders.append(Release(job.spec.id, job.generation))
                self._roster.discard(job.spec.id)
            else:
                job = lifecycle.assigned(job, at, change.allocation, rate, service)
                orders.append(Assign(job.spec.id, change.allocation, job.generation, change.purpose))
                self._waiting.discard(job.spec.id)
            self._store(job)

    def _occupy(self, changes: Sequence[Change]) -> None:
        """Move the changed jobs on the device map: all leave first, so that jobs may swap places."""
        occupancy = self._occupancy
        jobs = self._jobs
        self._refuse_plan(changes)
        for change in changes:
            held = jobs[change.job].desired
            if held is not None:
                occupancy.give(change.job, held)
        for index, change in enumerate(changes):
            if change.allocation is None:
                continue
            try:
                occupancy.take(jobs[change.job].spec, change.allocation, self.policy.max_virtual)
            except Overbooked:
                self._restore(changes, index)
                raise

    def _refuse_plan(self, changes: Sequence[Change]) -> None:
        """CarpoolError or Overbooked, with nothing changed yet, for a plan that was not drafted and cannot be one."""
        seen: set[JobId] = set()
        for change in changes:
            job = self._jobs.get(change.job)
            if job is None or job.phase not in (Phase.WAITING, Phase.RUNNING):
                raise CarpoolError(
                    f"policy {self.policy!r} changed job {change.job!r}, which is not waiting or running"
                )
            if change.job in seen:
                raise CarpoolError(f"policy {self.policy!r} changed job {change.job!r} twice in one plan")
            seen.add(change.job)
            if change.allocation is not None:
                job.check_lane(change.allocation)

    def _restore(self, changes: Sequence[Change], taken: int) -> None:
        """Undo a half-made move."""
        for change in changes[:taken]:
            if change.allocation is not None:
                self._occupancy.give(change.job, change.allocation)
        for change in changes:
            job = self._jobs[change.job]
            if job.desired is not None:
                self._occupancy.take(job.spec, job.desired, self.policy.max_virtual)

    def _foreseen(self, changes: Sequence[Change]) -> Mapping[JobId, Job]:
        """The jobs as they will stand after a plan: those who start in it are neighbours of each other already."""
        return ChainMap({job: self._jobs[job]._replace(desired=held) for job, held, _ in changes}, self._jobs)

    def _believed_rate(self, change: Change, jobs: Mapping[JobId, Job]) -> float:
        if change.allocation is None:
            return 0.0
        job = self._jobs[change.job]
        occupancy = self._occupancy
        placement = placement_of(occupancy, jobs, job, change.allocation, sharing=occupancy.is_shared)
        return self._estimator.rate(job.spec, placement).mean

    # ---------------------------------------------------------------------------------------------------- storing
    def _store(self, job: Job) -> None:
        """File a job under its phase."""
        self._jobs[job.spec.id] = job
        if job.desired is not None:
            if self._roster.is_ordered:
                self._roster.put(job, self.policy.running_key(job, self._estimator))
            elif job.spec.id not in self._roster:
                self._roster.put(job, 0)
        elif job.phase is Phase.WAITING:
            self._waiting.put(job, self.policy.waiting_key(job, self._estimator))

    def _vacate(self, job: Job) -> None:
        """Take a job off the device map and out of the queue."""
        if job.desired is not None:
            self._occupancy.give(job.spec.id, job.desired)
            self._roster.discard(job.spec.id)
        else:
            self._waiting.discard(job.spec.id)

    def _end(self, at: float, job: Job, step: Step, orders: list[Order]) -> None:
        """A job is over: it shrinks to how it ended, and those that waited for it are told."""
        phase = lifecycle.next_phase(job, step)
        self._vacate(job)
        del self._jobs[job.spec.id]
        self._ended[job.spec.id] = phase
        for dependent in self._dependents.pop(job.spec.id, ()):
            other = self._jobs.get(dependent)
            if other is None or other.phase is not Phase.BLOCKED:
                continue
            if phase is not Phase.FINISHED:
                self._fail_blocked(other, f"it waited for job {job.id!r}, which {phase}")
            elif all(self._ended.get(needed) is Phase.FINISHED for needed in other.spec.after):
                service = other.service
                self._store(lifecycle.moved(other, at, Step.ADMIT, service, "has what it waited for"))

    def _fail_blocked(self, job: Job, error: str) -> None:
        """A blocked job will never be admitted, and neither will those that wait for it: a loop, as chains are long."""
        doomed = [(job, error)]
        while doomed:
            job, error = doomed.pop()
            if self._jobs.pop(job.id, None) is None:
                continue
            self._ended[job.id] = lifecycle.next_phase(job, Step.FAIL)
            self._followed.append(JobFailed(job.id, job.generation, error))
            waited = [other for other in self._dependents.pop(job.id, ()) if other in self._jobs]
            doomed += [(self._jobs[other], f"it waited for job {job.id!r}, which failed") for other in waited]

    # ---------------------------------------------------------------------------------------------------- folding
    # Each handler returns whether the fact counted.
    def _on_submitted(self, at: float, fact: JobSubmitted, orders: list[Order]) -> bool:
        spec = fact.spec
        blocked = False
        for needed in spec.after:
            if self._ended.get(needed) is not Phase.FINISHED:
                self._dependents.setdefault(needed, []).append(spec.id)
                blocked = True
        job = lifecycle.submitted(spec, self._num_submitted, at, blocked=blocked)
        self._num_submitted += 1
        self._store(job)
        for needed in spec.after:
            if self._ended.get(needed, Phase.FINISHED) is not Phase.FINISHED:
                self._fail_blocked(job, f"it waited for job {needed!r}, which {self._ended[needed]}")
        return True

    def _on_cancelled(self, at: float, fact: JobCancelled, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None:
            return False
        if job.desired is not None:
            orders.append(Release(job.id, job.generation + 1))
        self._end(at, job, Step.CANCEL, orders)
        return True

    def _on_paused(self, at: float, fact: JobPaused, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or job.phase not in (Phase.WAITING, Phase.RUNNING):
            return False
        self._take_off(at, job, Step.PAUSE, "was paused", orders)
        return True

    def _on_resumed(self, at: float, fact: JobResumed, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or job.phase is not Phase.PAUSED:
            return False
        self._store(lifecycle.moved(job, at, Step.RESUME, job.service, "was resumed"))
        return True

    def _take_off(self, at: float, job: Job, step: Step, words: str, orders: list[Order]) -> Job:
        """Let a job hold nothing, by no plan of the policy's."""
        service = service_at(self.cluster, job, at)
        self._vacate(job)
        moved = lifecycle.moved(job, at, step, service, words)
        if job.desired is not None:
            orders.append(Release(moved.id, moved.generation))
        self._store(moved)
        return moved

    def _on_assign_applied(self, at: float, fact: AssignApplied, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or not counts(job, fact.generation):
            return False
        rate = job.believed if fact.generation == job.generation else job.rate
        service = service_at(self._occupancy.cluster, job, at)
        self._store(lifecycle.observed(job, at, fact.generation, fact.done, rate, service))
        return True

    def _on_release_applied(self, at: float, fact: ReleaseApplied, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or not counts(job, fact.generation):
            return False
        service = service_at(self.cluster, job, at)
        self._store(lifecycle.vacated(job, at, fact.generation, fact.done, service))
        return True

    def _on_progress(self, at: float, fact: ProgressReported, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or not counts(job, fact.generation):
            return False
        seen = lifecycle.observed(job, at, fact.generation, fact.done, fact.rate, service_at(self.cluster, job, at))
        if seen.observed is None:
            return False  # of an allocation that is no longer known
        if fact.generation in (job.applied, job.generation):
            self._estimator.learn(at, job if job.applied == fact.generation else seen, fact)
        self._store(seen)
        return True

    def _on_finished(self, at: float, fact: JobFinished, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or not counts(job, fact.generation):
            return False
        self._end(at, job, Step.FINISH, orders)
        return True

    def _on_failed(self, at: float, fact: JobFailed, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or not counts(job, fact.generation):
            return False
        self._end(at, job, Step.FAIL, orders)
        return True

    def _on_crashed(self, at: float, fact: JobCrashed, orders: list[Order]) -> bool:
        job = self._jobs.get(fact.job)
        if job is None or job.desired is None or not counts(job, fact.generation):
            return False
        service = service_at(self.cluster, job, at)
        crashed = lifecycle.vacated(job, at, fact.generation, fact.done, service, crashed=True)
        if crashed.crashes > job.spec.retries:
            orders.append(Release(job.id, job.generation + 1))
            error = f"crashed {crashed.crashes} times without progress, the last time: {fact.error}"
            self._followed.append(JobFailed(job.id, fact.generation, error))
            self._end(at, crashed, Step.FAIL, orders)
        else:
            self._take_off(at, crashed, Step.CRASH, f"crashed: {fact.error}", orders)
        return True

    def _on_node_joined(self, at: float, fact: NodeJoined, orders: list[Order]) -> bool:
        known = self._node_named(fact.name)
        if known is None:
            self._occupancy.join(self.cluster.joined(fact.name, fact.banks))
            return True
        if known.id not in self._occupancy.lost:
            return False
        self._occupancy.regain(known)
        return True

    def _node_named(self, name: str) -> Node | None:
        return next((node for node in self.cluster.nodes if node.name == name), None)

    def _on_node_lost(self, at: float, fact: NodeLost, orders: list[Order]) -> bool:
        if fact.node >= len(self.cluster.nodes) or fact.node in self._occupancy.lost:
            return False
        node = self.cluster.nodes[fact.node]
        for job in self._occupancy.jobs_on(node):
            self._take_off(at, self._jobs[job], Step.CRASH, f"lost node {node.name}", orders)
        self._occupancy.lose(node)
        return True


def _round_at(at: float, round_s: float) -> int:
    """The last round that has begun by `at`; rounds begin at whole multiples, as floats multiply."""
    number = floor(at / round_s)
    if (number + 1) * round_s <= at:
        return number + 1
    return number - 1 if number * round_s > at else number
