"""Cluster state: jobs by phase, device holders and job outcomes, folded from facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from carpool.core import lifecycle
from carpool.core.constraints.validation import plausible, validate_facts, validate_plan
from carpool.core.estimates import Estimator
from carpool.core.host_resources import HostResources
from carpool.core.lifecycle import JobUpdate, Transition, describe_update, requires_release, updated_spec
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Change,
    DeadlineMissed,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    LimitsChanged,
    LinkMeasured,
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeUndrained,
    Order,
    OutsidersSeen,
    Planned,
    Probe,
    ProgressReported,
    Release,
    ReleaseApplied,
    ResumabilityChanged,
    WeightChanged,
    Woke,
)
from carpool.core.model import DeviceId, Job, JobId, NodeId, Past, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Policy, service_at
from carpool.core.queue import Admission, Queue, RunningJobs
from carpool.core.state.job_order import JobOrder
from carpool.core.state.reconcile import is_current
from carpool.core.state.state_snapshot import StateSnapshot
from carpool.core.topology import Cluster, Link, Node


def apply_changes(occupancy: Occupancy, jobs: Mapping[JobId, Job], changes: Sequence[Change], most: float) -> None:
    """Release all changed jobs, then assign, so that jobs may swap devices; a device's fractions sum to at most `most`.

    Whatever is raised, such as Overbooked, leaves everything as it was.
    """
    for change in changes:
        held = jobs[change.job].desired
        if held is not None:
            occupancy.give(change.job, held)
    for index, change in enumerate(changes):
        if change.allocation is None:
            continue
        try:
            occupancy.take(jobs[change.job].spec, change.allocation, most)
        except Exception:
            _undo_changes(occupancy, jobs, changes, index)
            raise


def _undo_changes(occupancy: Occupancy, jobs: Mapping[JobId, Job], changes: Sequence[Change], taken: int) -> None:
    for change in changes[:taken]:
        if change.allocation is not None:
            occupancy.give(change.job, change.allocation)
    for change in changes:
        job = jobs[change.job]
        if job.desired is not None:
            occupancy.take(job.spec, job.desired, inf)  # it was allowed before


class ClusterState:
    """Jobs, queue, running jobs and occupancy, kept consistent as facts and plans are applied.

    `folds` has a handler for each fact type, which returns whether the fact counted. Orders that follow at once are
    appended to `orders`, and failures that follow to `followed`.
    """

    def __init__(self, cluster: Cluster, policy: Policy, estimator: Estimator, fallback: Policy | None = None) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.ended: dict[JobId, Phase] = {}
        self.occupancy = Occupancy(cluster)
        self.order = JobOrder(self.jobs, policy, estimator, fallback)
        self.outsiders: dict[DeviceId, OutsidersSeen] = {}  # by device
        self.drained: dict[NodeId, bool] = {}  # nodes that an operator took out: whether they are lost, too
        self.ranked: set[JobId] = set()  # jobs with a priority or a deadline, perhaps already over
        self.unsettled: set[JobId] = set()  # jobs whose last report names other devices than their last order
        self.followed: list[Fact] = []
        self._estimator = estimator
        self._admission = Admission(self.ended)
        self._num_submitted = 0
        self.folds: dict[type[Fact], Callable[[float, Any, list[Order]], bool]] = {
            JobSubmitted: self._on_submitted,
            JobCancelled: self._on_cancelled,
            JobPaused: self._on_paused,
            JobResumed: self._on_resumed,
            WeightChanged: self._on_amended,
            LimitsChanged: self._on_amended,
            ResumabilityChanged: self._on_amended,
            AssignApplied: self._on_assign_applied,
            ReleaseApplied: self._on_release_applied,
            ProgressReported: self._on_progress,
            JobFinished: self._on_finished,
            JobFailed: self._on_failed,
            JobCrashed: self._on_crashed,
            DeadlineMissed: lambda at, fact, orders: fact.job in self.jobs,
            NodeJoined: self._on_node_joined,
            NodeLost: self._on_node_lost,
            NodeDrained: self._on_node_drained,
            NodeUndrained: self._on_node_undrained,
            LinkMeasured: self._on_link_measured,
            OutsidersSeen: self._on_outsiders,
            Woke: lambda at, fact, orders: True,
        }

    @property
    def cluster(self) -> Cluster:
        return self.occupancy.cluster

    @property
    def waiting(self) -> Queue:
        return self.order.waiting

    @property
    def running_jobs(self) -> RunningJobs:
        return self.order.running_jobs

    def check(self) -> None:
        held: dict[JobId, Job] = {key: job for key, job in self.jobs.items() if job.desired is not None}
        assert set(self.running_jobs) == set(held), "the running jobs are exactly those that hold devices"
        waiting = {key for key, job in self.jobs.items() if job.phase is Phase.WAITING}
        assert set(self.waiting) == waiting, "the queue lists exactly the waiting jobs"
        fresh = Occupancy(self.cluster)
        for node in self.occupancy.lost:
            fresh.lose(self.cluster.nodes[node])
        fresh.set_foreign(self.occupancy.foreign_devices)
        for job in held.values():
            assert job.desired is not None
            fresh.take(job.spec, job.desired, inf)  # another policy may have put it there
        assert fresh.free_devices == self.occupancy.free_devices, "free devices are those that no job holds"

    def refuse_unusable(self, facts: Sequence[Fact]) -> None:
        """InputError for facts that cannot be true, such as a second job of one name; nothing is changed."""
        validate_facts(facts, (self.jobs, self.ended), lambda name: self._node_named(name) is not None)

    def as_snapshot(self) -> StateSnapshot:
        jobs = tuple(sorted(self.jobs.values(), key=lambda job: job.seq))
        running = tuple(self.running_jobs)
        kept = (jobs, self.occupancy.lost, running, dict(self.ended), self._num_submitted)
        return StateSnapshot(
            0.0, self.cluster, *kept, outsiders=tuple(self.outsiders.values()), drained=dict(self.drained)
        )

    def restore(self, state: StateSnapshot) -> None:
        """Start from a snapshot; nothing may have been submitted before."""
        assert not self._num_submitted, "a state is restored before any fact"
        assert self.cluster == state.cluster, "the state is of another cluster"
        for node in state.lost:
            self.occupancy.lose(self.cluster.nodes[node])
        self._set_foreign({seen.device: seen for seen in state.outsiders})
        self.drained.update(state.drained)
        self.ended.update(state.ended)
        self._num_submitted = state.num_submitted
        jobs = {job.id: job for job in state.jobs}
        self.ranked.update(job.id for job in state.jobs if job.spec.is_ranked)
        for job in sorted(state.jobs, key=lambda job: job.phase is Phase.BLOCKED):
            self._admission.restore(job.spec, job.phase)
        for name in (*state.running, *(job for job in jobs if jobs[job].desired is None)):
            job = jobs[name]
            if job.desired is not None:
                self.occupancy.take(job.spec, job.desired, inf)
            self._store(job)

    def adopt(self, at: float, planned: Planned, orders: list[Order]) -> None:
        """Make a plan's changes the desired state; the occupancy has them already."""
        cluster = self.occupancy.cluster
        for change, rate in zip(planned.changes, planned.believed, strict=True):
            job = self.jobs[change.job]
            service = service_at(cluster, job, at)
            if change.allocation is None:
                job = lifecycle.moved(job, at, Transition.RELEASE, service, "was released")
                orders.append(Release(job.spec.id, job.generation))
                self.order.discard(job.spec.id)
            else:
                probe_steps = change.purpose.steps if isinstance(change.purpose, Probe) else 0
                job = lifecycle.assigned(job, at, change.allocation, rate, service, probe_steps)
                orders.append(Assign(job.spec.id, change.allocation, job.generation, change.purpose))
                self.order.dequeue(job.spec.id)
            self._store(job)

    def occupy(self, changes: Sequence[Change], *, most: float | None = None) -> None:
        """Apply changes to the occupancy; fractions of a device sum to at most `most`, else the policy's limit."""
        policy = self.order.policy
        validate_plan(policy, self.jobs, changes)
        apply_changes(self.occupancy, self.jobs, changes, policy.max_virtual if most is None else most)

    def _store(self, job: Job) -> None:
        self.jobs[job.spec.id] = job
        if job.observed is not job.desired and job.observed != job.desired:
            self.unsettled.add(job.spec.id)
        elif self.unsettled:
            self.unsettled.discard(job.spec.id)
        self.order.put(job)

    def _vacate(self, job: Job) -> None:
        if job.desired is not None:
            self.occupancy.give(job.spec.id, job.desired)
        self.order.discard(job.spec.id)

    def _take_off(self, at: float, job: Job, transition: Transition, words: str, orders: list[Order]) -> Job:
        """Release a job outside the policy's plans."""
        service = service_at(self.cluster, job, at)
        self._vacate(job)
        moved = lifecycle.moved(job, at, transition, service, words)
        if job.desired is not None:
            orders.append(Release(moved.id, moved.generation))
        self._store(moved)
        return moved

    def _end(self, at: float, job: Job, transition: Transition, orders: list[Order]) -> None:
        """Keep only a job's outcome, and admit or fail the jobs that waited for it."""
        phase = lifecycle.next_phase(job, transition)
        self._vacate(job)
        del self.jobs[job.spec.id]
        self.unsettled.discard(job.spec.id)
        self.ended[job.spec.id] = phase
        for name in self._admission.next_after(job.spec):
            other = self.jobs.get(name)
            if other is None or other.phase is not Phase.BLOCKED:
                continue
            if phase is not Phase.FINISHED and job.id in other.spec.after:
                self._fail_blocked(other, f"dependency {job.id!r} {phase}")
            else:
                self._admit(at, other)

    def _admit(self, at: float, job: Job) -> None:
        """Queue a blocked job if its dependencies have finished and its array has room."""
        if self._admission.admits(job.spec):
            words = "was admitted: its dependencies finished"
            self._store(lifecycle.moved(job, at, Transition.ADMIT, job.service, words))

    def _fail_blocked(self, job: Job, error: str) -> None:
        """Fail a blocked job and, iteratively since chains are long, all jobs that depend on it."""
        doomed = [(job, error)]
        while doomed:
            job, error = doomed.pop()
            if self.jobs.pop(job.id, None) is None:
                continue
            self.ended[job.id] = lifecycle.next_phase(job, Transition.FAIL)
            self.followed.append(JobFailed(job.id, job.generation, error))
            waited = [other for other in self._admission.dependents(job.id) if other in self.jobs]
            doomed += [(self.jobs[other], f"dependency {job.id!r} failed") for other in waited]

    def _on_submitted(self, at: float, fact: JobSubmitted, orders: list[Order]) -> bool:
        spec = fact.spec
        job = lifecycle.submitted(spec, self._num_submitted, at, blocked=not self._admission.enter(spec))
        self._num_submitted += 1
        self._store(job)
        if spec.is_ranked:
            self.ranked.add(spec.id)
        for needed in spec.after:
            if self.ended.get(needed, Phase.FINISHED) is not Phase.FINISHED:
                self._fail_blocked(job, f"dependency {needed!r} {self.ended[needed]}")
        return True

    def _on_cancelled(self, at: float, fact: JobCancelled, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None:
            return False
        if job.desired is not None:
            orders.append(Release(job.id, job.generation + 1))
        self._end(at, job, Transition.CANCEL, orders)
        return True

    def _on_paused(self, at: float, fact: JobPaused, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or job.phase not in (Phase.WAITING, Phase.RUNNING):
            return False
        self._take_off(at, job, Transition.PAUSE, fact.reason or lifecycle.PAUSED, orders)
        for name in self._admission.leave(job.spec) if fact.reason else ():
            other = self.jobs.get(name)
            if other is not None and other.phase is Phase.BLOCKED:
                self._admit(at, other)
        return True

    def _on_resumed(self, at: float, fact: JobResumed, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or job.phase is not Phase.PAUSED:
            return False
        step = Transition.RESUME if self._admission.reenter(job.spec) else Transition.BLOCK
        self._store(lifecycle.moved(job, at, step, job.service, fact.reason or "was resumed"))
        return True

    def _on_amended(self, at: float, fact: JobUpdate, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None:
            return False
        job = job._replace(spec=updated_spec(job.spec, fact), past=Past(at, describe_update(fact), job.past))
        if requires_release(fact, job.desired):
            self._take_off(at, job, Transition.RELEASE, "was released: its device limits changed", orders)
        else:
            self._store(job)
        return True

    def _on_assign_applied(self, at: float, fact: AssignApplied, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or not is_current(job, fact.generation):
            return False
        rate = job.believed if fact.generation == job.generation else job.rate
        service = service_at(self.occupancy.cluster, job, at)
        self._store(lifecycle.observed(job, at, fact.generation, fact.done, rate, service))
        return True

    def _on_release_applied(self, at: float, fact: ReleaseApplied, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or not is_current(job, fact.generation):
            return False
        service = service_at(self.cluster, job, at)
        self._store(lifecycle.vacated(job, at, fact.generation, fact.done, service))
        return True

    def _on_progress(self, at: float, fact: ProgressReported, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or not is_current(job, fact.generation):
            return False
        fact = plausible(fact)
        seen = lifecycle.observed(job, at, fact.generation, fact.done, fact.rate, service_at(self.cluster, job, at))
        if seen.observed is None:
            return False  # of an allocation that was replaced since
        if fact.generation in (job.applied, job.generation):
            self._estimator.learn(at, job if job.applied == fact.generation else seen, fact)
        self._store(seen)
        return True

    def _on_finished(self, at: float, fact: JobFinished, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or not is_current(job, fact.generation):
            return False
        self._end(at, job, Transition.FINISH, orders)
        return True

    def _on_failed(self, at: float, fact: JobFailed, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or not is_current(job, fact.generation):
            return False
        self._end(at, job, Transition.FAIL, orders)
        return True

    def _on_crashed(self, at: float, fact: JobCrashed, orders: list[Order]) -> bool:
        job = self.jobs.get(fact.job)
        if job is None or job.desired is None or not is_current(job, fact.generation):
            return False
        service = service_at(self.cluster, job, at)
        crashed = lifecycle.vacated(job, at, fact.generation, fact.done, service, crashed=True)
        if crashed.crashes > job.spec.retries:
            orders.append(Release(job.id, job.generation + 1))
            error = f"crashed {crashed.crashes} times without progress; last error: {fact.error}"
            self.followed.append(JobFailed(job.id, fact.generation, error))
            self._end(at, crashed, Transition.FAIL, orders)
        else:
            self._take_off(at, crashed, Transition.CRASH, f"crashed: {fact.error}", orders)
        return True

    def _on_node_joined(self, at: float, fact: NodeJoined, orders: list[Order]) -> bool:
        known = self._node_named(fact.name)
        if known is None:
            return self._add_node(fact)
        if known.id not in self.occupancy.lost:
            return False
        if fact.supplies:
            self.occupancy.cluster = self.cluster.with_resources(known.id, HostResources(*fact.supplies))
        if known.id in self.drained:
            self.drained[known.id] = False
        else:
            self.occupancy.regain(known)
        return True

    def _add_node(self, fact: NodeJoined) -> bool:
        """Add a new node; False if the place that it wants is not free."""
        place = self._node_named(fact.replaces) if fact.replaces else None
        if fact.replaces and (place is None or not self._can_replace(place, fact)):
            return False
        cluster = self.cluster.with_join(fact.name, fact.banks, HostResources(*fact.supplies), fact.replaces)
        if place is None:
            self.occupancy.join(cluster)
        else:
            self.occupancy.cluster = cluster
            self.occupancy.regain(cluster.nodes[place.id])
        return True

    def _can_replace(self, place: Node, fact: NodeJoined) -> bool:
        is_free = place.id in self.occupancy.lost and place.id not in self.drained
        return is_free and place.bank_sizes == fact.banks

    def _on_node_undrained(self, at: float, fact: NodeUndrained, orders: list[Order]) -> bool:
        known = self._node_named(fact.name)
        if known is None or known.id not in self.drained:
            return False
        if not self.drained.pop(known.id):
            self.occupancy.regain(known)
        return True

    def _on_node_drained(self, at: float, fact: NodeDrained, orders: list[Order]) -> bool:
        if fact.node >= len(self.cluster.nodes) or fact.node in self.drained:
            return False
        is_lost = fact.node in self.occupancy.lost
        self.drained[fact.node] = is_lost
        if not is_lost:
            name = self.cluster.nodes[fact.node].name
            self._clear_node(at, fact.node, Transition.RELEASE, f"was released: node {name} is drained", orders)
        return True

    def _on_node_lost(self, at: float, fact: NodeLost, orders: list[Order]) -> bool:
        if fact.node in self.drained:
            was_lost, self.drained[fact.node] = self.drained[fact.node], True
            return not was_lost
        if fact.node >= len(self.cluster.nodes) or fact.node in self.occupancy.lost:
            return False
        name = self.cluster.nodes[fact.node].name
        self._clear_node(at, fact.node, Transition.CRASH, f"lost node {name}", orders)
        return True

    def _clear_node(self, at: float, number: NodeId, transition: Transition, words: str, orders: list[Order]) -> None:
        """Take all jobs off a node, which then has no free devices."""
        node = self.cluster.nodes[number]
        for job in self.occupancy.jobs_on(node):
            self._take_off(at, self.jobs[job], transition, words, orders)
        self._set_foreign({device: seen for device, seen in self.outsiders.items() if device not in node.devices})
        self.occupancy.lose(node)

    def _on_link_measured(self, at: float, fact: LinkMeasured, orders: list[Order]) -> bool:
        if not fact.bytes_per_s or self._node_named(fact.one) is None or self._node_named(fact.other) is None:
            return False
        link = Link((fact.one, fact.other), fact.bytes_per_s, fact.latency_s)
        self.occupancy.cluster = self.cluster.with_link(link)
        return True

    def _on_outsiders(self, at: float, fact: OutsidersSeen, orders: list[Order]) -> bool:
        if not 0 <= fact.device < self.cluster.num_devices or fact == self.outsiders.get(fact.device):
            return False
        others = {device: seen for device, seen in self.outsiders.items() if device != fact.device}
        self._set_foreign({**others, fact.device: fact} if fact.processes else others)
        return True

    def _set_foreign(self, outsiders: dict[DeviceId, OutsidersSeen]) -> None:
        self.outsiders = outsiders
        self.occupancy.set_foreign(frozenset(device for device, seen in outsiders.items() if seen.keeps_free))

    def _node_named(self, name: str) -> Node | None:
        return next((node for node in self.cluster.nodes if node.name == name), None)
