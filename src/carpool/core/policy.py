"""Policy interface: cadence and its timer, snapshot, plan, and the policy base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any, ClassVar

from carpool.core.estimates import Estimator
from carpool.core.lifecycle import Service
from carpool.core.messages import (
    Change,
    Fact,
    JobCancelled,
    JobCrashed,
    JobFailed,
    JobFinished,
    JobPaused,
    JobResumed,
    JobSubmitted,
    LimitsChanged,
    NodeJoined,
    NodeLost,
    OutsidersSeen,
    PolicyChanged,
    WeightChanged,
)
from carpool.core.model import Allocation, DeviceId, Job, JobId, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.queue import Queue, RunningJobs
from carpool.core.topology import Cluster, Neighbour, Placement

ARRIVALS_AND_ENDINGS: frozenset[type[Fact]] = frozenset(
    {JobSubmitted, JobResumed, JobFinished, JobFailed, JobCrashed, JobCancelled, JobPaused, NodeJoined, NodeLost}
    | {WeightChanged, LimitsChanged, PolicyChanged, OutsidersSeen}
)


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a policy is asked: after which facts, at most how often, or in fixed rounds."""

    triggers: frozenset[type[Fact]] = ARRIVALS_AND_ENDINGS
    min_interval_s: float = 0.0  # a plan sooner after the last one is put off until then
    round_s: float = 0.0  # above 0: only at multiples of this, whatever happens in between


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes to what jobs hold (what is not mentioned stays as it is), and the reason in words."""

    changes: tuple[Change, ...] = ()
    reason: str = ""
    wake_at: float | None = None  # ask again then, even if nothing happens
    note: object = None  # JSON-able; handed back in the next snapshot
    drafted: Occupancy | None = field(default=None, compare=False, repr=False)  # the map it was tried on, if it was

    NOTHING: ClassVar[Plan]


Plan.NOTHING = Plan()


class Policy(ABC):
    """One decision rule. Same snapshot, same plan; parameters are frozen dataclass fields.

    `waiting_key` and `running_key` let the scheduler keep jobs in the policy's order. Each must stay the same while
    the job's record does: the remaining work of a waiting job, the expected end of a running one.
    """

    cadence: ClassVar[Cadence] = Cadence()
    max_virtual: ClassVar[float] = 1.0  # how far fractions on one device may sum
    shares_devices: ClassVar[bool] = False  # whether it ever puts two jobs on one device
    keeps_running_order: ClassVar[bool] = False  # whether `running_key` is to be maintained

    @property
    def may_share(self) -> bool:
        """Whether it gives out less than whole devices, or one device twice."""
        return self.shares_devices or self.max_virtual > 1.0

    @abstractmethod
    def plan(self, view: Snapshot) -> Plan:
        """Decide what changes now."""

    def why(self, view: Snapshot, job: Job) -> str:
        """Why a job stands as it does now, in one sentence for people."""
        if job.desired is not None:
            return f"holds {job.desired.num_devices} device{'s' if job.desired.num_devices != 1 else ''}"
        if job.id not in view.waiting:
            return f"is {job.phase}"
        ahead = list(view.waiting).index(job.id)
        return f"waits with {ahead} job{'s' if ahead != 1 else ''} before it in the queue, and {len(view.roster)} run"

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        """Where a waiting job stands in the queue; ties go by order of submission."""
        return 0

    def running_key(self, job: Job, estimates: Estimator) -> Any:
        """Where a running job stands among the running ones."""
        return 0


class Snapshot:
    """The scheduler's state at one instant, to read. A view, not a copy: valid during one call of `Policy.plan`."""

    __slots__ = ("at", "estimates", "jobs", "note", "occupancy", "policy", "roster", "waiting")

    def __init__(
        self,
        policy: Policy,
        occupancy: Occupancy,
        jobs: Mapping[JobId, Job],
        waiting: Queue,
        roster: RunningJobs,
        estimates: Estimator,
    ) -> None:
        self.at = 0.0
        self.note: object = None
        self.policy = policy
        self.occupancy = occupancy
        self.jobs = jobs  # all that are not over
        self.waiting = waiting
        self.roster = roster
        self.estimates = estimates

    @property
    def cluster(self) -> Cluster:
        """The nodes and devices there are."""
        return self.occupancy.cluster

    def running(self, *, last_first: bool = False) -> Iterator[Job]:
        """Running jobs in the policy's running order (else in order of their start)."""
        for job in reversed(self.roster) if last_first else self.roster:
            yield self.jobs[job]

    def active(self) -> Iterator[Job]:
        """Waiting jobs in queue order, then running ones."""
        for job in self.waiting:
            yield self.jobs[job]
        yield from self.running()

    def kinds_for(self, job: Job) -> Sequence[Kind]:
        """Kinds the job may run on and that have the memory it needs: in its own order, else in the cluster's."""
        kinds = job.spec.kinds or self.cluster.kinds
        needed = job.spec.memory_bytes
        if not needed:
            return kinds
        least = self.cluster.least_memory  # placing looks at kinds, not at single devices
        return [kind for kind in kinds if not 0 < least.get(kind, 0) < needed]

    def placement(self, job: Job, allocation: Allocation) -> Placement:
        """What an allocation looks like to a rate model, with the present neighbours on its devices."""
        sharing = self.policy.shares_devices or self.occupancy.is_shared
        return placement_of(self.occupancy, self.jobs, job, allocation, sharing=sharing)

    def rate(self, job: Job, allocation: Allocation) -> float:
        """Believed units of work per second under an allocation, beside the present neighbours."""
        return self.estimates.rate(job.spec, self.placement(job, allocation)).mean

    def service(self, job: Job) -> Service:
        """Device-seconds the job has received of each kind until now."""
        return service_at(self.cluster, job, self.at)

    def attained_s(self, job: Job) -> float:
        """Device-seconds the job has received until now."""
        return sum([seconds for _, seconds in self.service(job)])


def placement_of(
    occupancy: Occupancy, jobs: Mapping[JobId, Job], job: Job, allocation: Allocation, *, sharing: bool = True
) -> Placement:
    """Describe an allocation and who else is on its devices; `sharing` False: nobody is, as the caller knows."""
    alone = occupancy.cluster.placement(allocation)
    if not sharing:
        return alone
    return alone.among([_beside(occupancy, jobs, job, device) for device in allocation.devices()])


def _beside(occupancy: Occupancy, jobs: Mapping[JobId, Job], job: Job, device: DeviceId) -> dict[JobId, Neighbour]:
    """Who else is on a device."""
    found: dict[JobId, Neighbour] = {}
    for resident in occupancy.residents(device):
        other = jobs.get(resident.job)
        if resident.job == job.spec.id or other is None:
            continue
        held = other.desired
        if held is None:
            found[resident.job] = Neighbour(other.spec, resident.fraction)
            continue
        groups = occupancy.cluster.groups_of(held)
        turn = held.shares[0].turn
        found[resident.job] = Neighbour(other.spec, resident.fraction, held.batch_size, turn, groups)
    return found


def service_at(cluster: Cluster, job: Job, at: float) -> Service:
    """Device-seconds received per kind up to `at`, a share counted by its fraction.

    Counted from the order on: reserved devices serve nobody else.
    """
    held = job.desired
    elapsed = at - job.as_of
    if held is None or elapsed <= 0.0:
        return job.service
    service = dict(job.service)
    placement = cluster.placement(held)
    for kind, count in placement.groups:
        service[kind] = service.get(kind, 0.0) + count * placement.fraction * elapsed
    return tuple(service.items())


class PlanTimer:
    """Keeps one policy's time. What it is told of plans and triggers is all it knows."""

    __slots__ = ("breath_s", "cadence", "is_triggered", "planned_at", "wanted_at")

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.breath_s = 0.0  # a plan is put off so long after the last one at least, whatever the cadence says
        self.is_triggered = False  # something has happened after which the cadence wants a plan
        self.planned_at: float | None = None  # when the policy was asked last
        self.wanted_at: float | None = None  # when the last plan wants to be followed by another

    @property
    def may_be_due(self) -> bool:
        """Whether there is anything to look at; False, as after most facts, saves the rest."""
        return self.is_triggered or self.wanted_at is not None or self.cadence.round_s > 0.0

    def is_due(self, at: float, *, has_jobs: bool) -> bool:
        """Whether the policy is asked now."""
        round_s = self.cadence.round_s
        if round_s:
            begun = _round_at(at, round_s)
            is_new = self.planned_at is None or _round_at(self.planned_at, round_s) < begun
            return has_jobs and is_new and begun * round_s == at
        if self.wanted_at is not None and at >= self.wanted_at:
            return True
        return self.is_triggered and (self.planned_at is None or at >= self.planned_at + self._interval_s)

    def next_at(self, at: float, *, has_jobs: bool) -> float | None:
        """When it will be due, if nothing happens before."""
        round_s = self.cadence.round_s
        if round_s:
            return (_round_at(at, round_s) + 1) * round_s if has_jobs else None
        if self.is_triggered and self.planned_at is not None:
            put_off = self.planned_at + self._interval_s
            return put_off if self.wanted_at is None else min(put_off, self.wanted_at)
        return self.wanted_at

    def planned(self, at: float, wanted_at: float | None) -> None:
        """The policy was asked."""
        self.is_triggered = False
        self.planned_at = at
        self.wanted_at = wanted_at

    def begin_anew(self) -> None:
        """Another policy will be asked, as soon as may be."""
        self.is_triggered = True
        self.planned_at = self.wanted_at = None

    @property
    def _interval_s(self) -> float:
        return max(self.cadence.min_interval_s, self.breath_s)


def _round_at(at: float, round_s: float) -> int:
    """The last round that has begun by `at`; rounds begin at whole multiples, as floats multiply."""
    number = floor(at / round_s)
    if (number + 1) * round_s <= at:
        return number + 1
    return number - 1 if number * round_s > at else number
