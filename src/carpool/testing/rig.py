"""Scheduler rig: a fake clock and backend, scheduler invariants, and step-by-step facts and orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.core.estimates import Estimator
from carpool.core.host_resources import HostResources
from carpool.core.messages import (
    Assign,
    AssignApplied,
    Fact,
    JobCrashed,
    JobFailed,
    JobFinished,
    Order,
    ProgressReported,
    Record,
    Release,
    ReleaseApplied,
)
from carpool.core.model import Allocation, Job, JobId, Phase
from carpool.core.occupancy import Occupancy
from carpool.core.policy import Cadence, Policy
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Fifo


class FakeClock:
    """A clock that advances only on request."""

    def __init__(self, at: float = 0.0) -> None:
        self._at = at

    def now(self) -> float:
        return self._at

    def advance(self, seconds: float) -> float:
        assert seconds >= 0.0, f"time does not run backwards: {seconds} s"
        self._at += seconds
        return self._at


class FakeBackend:
    """Records every order, and answers at once or when asked to.

    It models the answers that a backend owes the scheduler, but no work: the test itself reports progress, ends and
    crashes.
    """

    def __init__(self, *, answers_at_once: bool = True) -> None:
        self.answers_at_once = answers_at_once
        self.orders: list[tuple[float, Order]] = []
        self.holds: dict[JobId, Allocation] = {}
        self.done: dict[JobId, float] = {}
        self._generation: dict[JobId, int] = {}  # of the newest order
        self._applied: dict[JobId, int] = {}
        self._over: set[JobId] = set()
        self._unanswered: list[Order] = []

    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        """Record orders; returns the answers if it answers at once."""
        for order in orders:
            self.orders.append((at, order))
            newest = self._generation.get(order.job, 0)
            if order.job not in self._over and order.generation >= newest:
                self._generation[order.job] = order.generation
                self._unanswered.append(order)
        return self.answer() if self.answers_at_once else ()

    def answer(self) -> list[Fact]:
        """Execute pending orders, in order; one fact each."""
        orders, self._unanswered = self._unanswered, []
        return [self._carry_out(order) for order in orders if order.job not in self._over]

    def last_order(self, job: str) -> Order | None:
        return next((order for _, order in reversed(self.orders) if order.job == job), None)

    def progress(self, job: str, done: float, rate: float = 1.0) -> ProgressReported:
        self.done[JobId(job)] = done
        return ProgressReported(JobId(job), self._applied[JobId(job)], done, rate)

    def finish(self, job: str) -> JobFinished:
        return JobFinished(JobId(job), self._leave(job, over=True))

    def fail(self, job: str, error: str = "it went wrong") -> JobFailed:
        return JobFailed(JobId(job), self._leave(job, over=True), error)

    def crash(self, job: str, error: str = "it was killed") -> JobCrashed:
        return JobCrashed(JobId(job), self._leave(job, over=False), self.done.get(JobId(job), 0.0), error)

    def _carry_out(self, order: Order) -> Fact:
        self._applied[order.job] = order.generation
        done = self.done.get(order.job, 0.0)
        if isinstance(order, Assign):
            self.holds[order.job] = order.allocation
            return AssignApplied(order.job, order.generation, done)
        assert isinstance(order, Release)
        self.holds.pop(order.job, None)
        return ReleaseApplied(order.job, order.generation, done)

    def _leave(self, job: str, *, over: bool) -> int:
        name = JobId(job)
        assert name in self.holds, f"job {job!r} holds nothing here"
        del self.holds[name]
        if over:
            self._over.add(name)
        return self._applied[name]


def check_state(scheduler: Scheduler) -> None:
    """Assert that queue, running jobs and occupancy agree with the jobs themselves."""
    scheduler.check()
    view = scheduler.snapshot()
    holders: dict[int, dict[JobId, float]] = {}
    for job in scheduler.jobs.values():
        assert (job.phase is Phase.RUNNING) == (job.desired is not None), f"{job.id} is {job.phase}: {job.desired}"
        assert job.applied <= job.generation, f"{job.id}: a generation was applied that was never ordered"
        if job.desired is None:
            continue
        assert job.spec.narrowest <= job.desired.num_devices <= job.spec.widest, f"{job.id} holds {job.desired}"
        for share in job.desired.shares:
            for device in share.devices:
                held = holders.setdefault(device, {})
                assert job.id not in held, f"{job.id} holds device {device} twice"
                held[job.id] = share.fraction
    check_occupancy(view.occupancy, holders, scheduler.policy.max_virtual)
    check_host_resources(scheduler)


def check_host_resources(scheduler: Scheduler) -> None:
    """Assert that jobs hold no more cores, RAM or disk than each node has."""
    for node in scheduler.cluster.nodes:
        total = HostResources()
        for job in scheduler.jobs.values():
            here = 0 if job.desired is None else len(set(job.desired.devices()) & set(node.devices))
            total = total.plus(job.spec.resources_for(here)) if here else total
        for has, taken in zip(node.resources, total, strict=True):
            assert not has or taken <= has, f"node {node.name} has {node.resources}, jobs hold {total}"
        assert scheduler.snapshot().occupancy.host_usage.taken(node.id) == total, (
            f"what node {node.name} believes is held"
        )


def check_occupancy(occupancy: Occupancy, holders: dict[int, dict[JobId, float]], max_virtual: float = 1.0) -> None:
    """Assert that an occupancy agrees with the holders of every device, node and type."""
    cluster = occupancy.cluster
    free_devices = dict.fromkeys(cluster.kinds, 0)
    by_free: dict[str, dict[int, int]] = {kind: {} for kind in cluster.kinds}
    for node in cluster.nodes:
        lost = node.id in occupancy.lost
        mask = 0
        free_here: dict[str, int] = {}
        for bank in node.banks:
            for device in bank.devices:
                held = holders.get(device, {})
                there = {resident.job: resident.fraction for resident in occupancy.residents(device)}
                assert there == held, f"device {device} has residents {there}, the jobs say {held}"
                assert not (lost and held), f"device {device} is lost and held by {held}"
                assert sum(held.values()) <= max_virtual + 1e-9, f"device {device} is overbooked: {held}"
                if not held and not lost and device not in occupancy.foreign_devices:
                    mask |= 1 << (device - node.devices.start)
                    free_here[bank.kind] = free_here.get(bank.kind, 0) + 1
                    free_devices[bank.kind] += 1
        assert occupancy.free_mask(node.id) == mask, f"free devices of node {node.name}"
        for kind, count in free_here.items():
            by_free[kind][count] = by_free[kind].get(count, 0) | 1 << node.id
    assert occupancy.free_devices == free_devices, "free devices of each kind"
    for kind in cluster.kinds:
        assert occupancy.nodes_by_free(kind) == by_free[kind], f"nodes by free devices of kind {kind}"
    assert occupancy.is_shared == any(len(held) > 1 for held in holders.values()), "whether any device is shared"


class Rig:
    """A scheduler, its records, and a backend that answers on request."""

    def __init__(
        self,
        policy: Policy | None = None,
        groups: Iterable[tuple[int, int, str]] = ((1, 4, "V100"),),
        *,
        cluster: Cluster | None = None,
        cadence: Cadence | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        self.records: list[Record] = []
        self.backend = FakeBackend(answers_at_once=False)
        self.scheduler = Scheduler(
            cluster or Cluster.build(groups),
            policy or Fifo(),
            cadence=cadence,
            estimator=estimator,
            observers=(self,),
        )

    def record(self, record: Record) -> None:
        self.records.append(record)

    def say(self, at: float, *facts: Fact) -> list[Order]:
        orders = self.scheduler.handle(at, facts)
        self.backend.apply(at, orders)
        check_state(self.scheduler)
        return orders

    def answered(self, at: float) -> list[Order]:
        return self.say(at, *self.backend.answer())

    def wakes(self) -> float | None:
        return self.scheduler.wake_at

    def job(self, name: str) -> Job:
        return self.scheduler.jobs[JobId(name)]
