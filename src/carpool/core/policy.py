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
    NodeDrained,
    NodeJoined,
    NodeLost,
    NodeUndrained,
    OutsidersSeen,
    PolicyChanged,
    ResumabilityChanged,
    WeightChanged,
)
from carpool.core.model import Allocation, DeviceId, Job, JobId, Kind
from carpool.core.occupancy import Occupancy
from carpool.core.queue import Queue, RunningJobs
from carpool.core.topology import Cluster, Neighbour, Placement

ARRIVALS_AND_ENDINGS: frozenset[type[Fact]] = frozenset(
    {JobSubmitted, JobResumed, JobFinished, JobFailed, JobCrashed, JobCancelled, JobPaused, NodeJoined, NodeLost}
    | {NodeDrained, NodeUndrained}
    | {WeightChanged, LimitsChanged, ResumabilityChanged, PolicyChanged, OutsidersSeen}
)


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a policy plans: after which facts, at most how often, or in fixed rounds."""

    triggers: frozenset[type[Fact]] = ARRIVALS_AND_ENDINGS
    min_interval_s: float = 0.0  # between two plans
    round_s: float = 0.0  # above 0: plan only at multiples of this


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes to the allocations of jobs, and the reason in words."""

    changes: tuple[Change, ...] = ()
    reason: str = ""
    wake_at: float | None = None  # plan again then, even if nothing happens
    note: object = None  # JSON-able; handed back in the next snapshot
    # The occupancy of its draft, if it was drafted.
    drafted: Occupancy | None = field(default=None, compare=False, repr=False)

    NOTHING: ClassVar[Plan]


Plan.NOTHING = Plan()


class Policy(ABC):
    """A scheduling policy: a deterministic function of a snapshot. Parameters are fields of a frozen dataclass.

    The scheduler keeps jobs in the order of `waiting_key` and `running_key`. A key may depend only on the job's record,
    such as the remaining work of a waiting job or the expected end of a running one.
    """

    cadence: ClassVar[Cadence] = Cadence()
    max_virtual: ClassVar[float] = 1.0  # limit on the sum of fractions of a device
    shares_devices: ClassVar[bool] = False  # whether it assigns two jobs to one device
    keeps_running_order: ClassVar[bool] = False  # whether `running_key` is used

    @property
    def may_share(self) -> bool:
        """Whether it assigns fractions of devices, or one device twice."""
        return self.shares_devices or self.max_virtual > 1.0

    @abstractmethod
    def plan(self, view: Snapshot) -> Plan:
        """Decide what changes now."""

    def why(self, view: Snapshot, job: Job) -> str:
        """What the policy adds to the reason of a job's state (see `core.reasons`), in plain words; empty: nothing."""
        return ""

    def details(self, view: Snapshot, job: Job) -> str:
        """Figures behind its decision about a job, for ``carpool why --verbose``; empty: none."""
        return ""

    def start_order(self, view: Snapshot) -> Sequence[JobId]:
        """The waiting jobs in the order in which it would start them, priorities aside."""
        return tuple(view.waiting)

    def waiting_key(self, job: Job, estimates: Estimator) -> Any:
        """Sort key of a waiting job; ties go by order of submission."""
        return 0

    def running_key(self, job: Job, estimates: Estimator) -> Any:
        """Sort key of a running job."""
        return 0


class Snapshot:
    """A read-only view of the scheduler's state, valid during one call of `Policy.plan`."""

    __slots__ = ("at", "estimates", "jobs", "note", "occupancy", "policy", "running_jobs", "waiting")

    def __init__(
        self,
        policy: Policy,
        occupancy: Occupancy,
        jobs: Mapping[JobId, Job],
        waiting: Queue,
        running_jobs: RunningJobs,
        estimates: Estimator,
    ) -> None:
        self.at = 0.0
        self.note: object = None
        self.policy = policy
        self.occupancy = occupancy
        self.jobs = jobs  # all that are not over
        self.waiting = waiting
        self.running_jobs = running_jobs
        self.estimates = estimates

    @property
    def cluster(self) -> Cluster:
        return self.occupancy.cluster

    def running(self, *, last_first: bool = False) -> Iterator[Job]:
        """Running jobs in the policy's running order, else in order of their start."""
        for job in reversed(self.running_jobs) if last_first else self.running_jobs:
            yield self.jobs[job]

    def active(self) -> Iterator[Job]:
        """Waiting jobs in queue order, then running ones."""
        for job in self.waiting:
            yield self.jobs[job]
        yield from self.running()

    def kinds_for(self, job: Job) -> Sequence[Kind]:
        """Device types the job may use and that have the memory it needs, in the job's order, else the cluster's."""
        kinds = job.spec.kinds or self.cluster.kinds
        needed = job.spec.memory_bytes
        if not needed:
            return kinds
        least = self.cluster.least_memory  # placement chooses by type, not by device
        return [kind for kind in kinds if not 0 < least.get(kind, 0) < needed]

    def placement(self, job: Job, allocation: Allocation) -> Placement:
        """An allocation as a rate model sees it, with the current neighbours on its devices."""
        sharing = self.policy.shares_devices or self.occupancy.is_shared
        return placement_of(self.occupancy, self.jobs, job, allocation, sharing=sharing)

    def rate(self, job: Job, allocation: Allocation) -> float:
        """Estimated units of work per second under an allocation, beside the current neighbours."""
        return self.estimates.rate(job.spec, self.placement(job, allocation)).mean

    def service(self, job: Job) -> Service:
        """Device-seconds received so far, by device type."""
        return service_at(self.cluster, job, self.at)

    def attained_s(self, job: Job) -> float:
        """Device-seconds received so far."""
        return sum([seconds for _, seconds in self.service(job)])


def placement_of(
    occupancy: Occupancy, jobs: Mapping[JobId, Job], job: Job, allocation: Allocation, *, sharing: bool = True
) -> Placement:
    """An allocation with its neighbours; `sharing` False: the caller knows that there are none."""
    alone = occupancy.cluster.placement(allocation)
    if not sharing:
        return alone
    return alone.among([_neighbours(occupancy, jobs, job, device) for device in allocation.devices()])


def _neighbours(occupancy: Occupancy, jobs: Mapping[JobId, Job], job: Job, device: DeviceId) -> dict[JobId, Neighbour]:
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
    """Device-seconds received per device type up to `at`, shares counted by their fraction.

    Counted from the order on, since reserved devices serve no other job.
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
    """Decides when a policy plans, from its cadence, triggers and previous plans."""

    __slots__ = ("cadence", "is_triggered", "min_pause_s", "planned_at", "wanted_at")

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        self.min_pause_s = 0.0  # least time between plans, whatever the cadence says
        self.is_triggered = False  # a trigger of the cadence has occurred
        self.planned_at: float | None = None  # time of the last plan
        self.wanted_at: float | None = None  # `wake_at` of the last plan

    @property
    def may_be_due(self) -> bool:
        """Quick check: False, as after most facts, means not due."""
        return self.is_triggered or self.wanted_at is not None or self.cadence.round_s > 0.0

    def is_due(self, at: float, *, has_jobs: bool) -> bool:
        round_s = self.cadence.round_s
        if round_s:
            begun = _round_at(at, round_s)
            is_new = self.planned_at is None or _round_at(self.planned_at, round_s) < begun
            return has_jobs and is_new and begun * round_s == at
        if self.wanted_at is not None and at >= self.wanted_at:
            return True
        return self.is_triggered and (self.planned_at is None or at >= self.planned_at + self._interval_s)

    def next_at(self, at: float, *, has_jobs: bool) -> float | None:
        round_s = self.cadence.round_s
        if round_s:
            return (_round_at(at, round_s) + 1) * round_s if has_jobs else None
        if self.is_triggered and self.planned_at is not None:
            earliest = self.planned_at + self._interval_s
            return earliest if self.wanted_at is None else min(earliest, self.wanted_at)
        return self.wanted_at

    def planned(self, at: float, wanted_at: float | None) -> None:
        self.is_triggered = False
        self.planned_at = at
        self.wanted_at = wanted_at

    def reset(self) -> None:
        """Plan as soon as possible, for a new policy."""
        self.is_triggered = True
        self.planned_at = self.wanted_at = None

    @property
    def _interval_s(self) -> float:
        return max(self.cadence.min_interval_s, self.min_pause_s)


def _round_at(at: float, round_s: float) -> int:
    """The last round that has begun by `at`; rounds begin at whole multiples, as floats multiply."""
    number = floor(at / round_s)
    if (number + 1) * round_s <= at:
        return number + 1
    return number - 1 if number * round_s > at else number
