"""Scheduler messages: facts, orders, plans and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, NodeId
from carpool.core.typed_fields import Amount, Measured

# Facts of one instant are folded by rank: progress, then what frees devices, then what changes the cluster, then what
# requests devices.
_PROGRESS, _FREES, _CHANGES, _REQUESTS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has happened. `Scheduler.handle` gets the instant once for a batch of facts."""

    rank: ClassVar[int] = _CHANGES


@dataclass(frozen=True, slots=True)
class JobSubmitted(Fact):
    """A user submitted a job."""

    spec: JobSpec
    rank: ClassVar[int] = _REQUESTS


@dataclass(frozen=True, slots=True)
class JobCancelled(Fact):
    """A user cancelled a job, or the rule of its sweep stopped it."""

    job: JobId
    reason: str = ""  # of the sweep's rule; empty: the user's
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobPaused(Fact):
    """A job was paused and releases its devices.

    If its user did not pause it, it also leaves its place in its sweep.
    """

    job: JobId
    reason: str = ""  # of the sweep's rule, or of the daemon's; empty: the user's
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobResumed(Fact):
    """A paused job was resumed; it is queued again."""

    job: JobId
    reason: str = ""  # of the sweep's rule; empty: the user's
    rank: ClassVar[int] = _REQUESTS


@dataclass(frozen=True, slots=True)
class WeightChanged(Fact):
    """A user changed a job's weight."""

    job: JobId
    weight: float
    rank: ClassVar[int] = _REQUESTS


@dataclass(frozen=True, slots=True)
class LimitsChanged(Fact):
    """A user changed the number of devices a job may hold."""

    job: JobId
    min_devices: int
    max_devices: int
    rank: ClassVar[int] = _REQUESTS


@dataclass(frozen=True, slots=True)
class ResumabilityChanged(Fact):
    """An executor learned whether a job keeps its work when it loses its devices."""

    job: JobId
    resumable: bool


@dataclass(frozen=True, slots=True)
class PolicyChanged(Fact):
    """Another policy decides from now on, starting from the current allocations."""

    policy: str  # as text
    fault: str = ""  # failure of the previous policy, where that is the reason


@dataclass(frozen=True, slots=True)
class AssignApplied(Fact):
    """The job runs under this generation's allocation from now on, with `done` units of work done."""

    job: JobId
    generation: int
    done: Amount
    rank: ClassVar[int] = _PROGRESS


@dataclass(frozen=True, slots=True)
class ReleaseApplied(Fact):
    """The job has released its devices with `done` units of work saved."""

    job: JobId
    generation: int
    done: Amount
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class ProgressReported(Fact):
    """A measurement of a running job: work done, rate since the last report, and signals of the training."""

    job: JobId
    generation: int
    done: Amount
    rate: Amount
    loss: Measured | None = None
    noise: Measured | None = None  # gradient noise scale, in samples
    step_s: float | None = None  # seconds of one step, synchronisation included
    sync_s: float | None = None  # of these, seconds of synchronisation that computation did not hide
    alone: bool = False  # measured by a probe, while the other jobs on its devices were stopped
    memory_bytes: int = 0  # peak device memory of a worker so far; 0: unknown
    busy: tuple[Amount, ...] = ()  # portion of a step that each device computes, by ascending device; empty: unknown
    rank: ClassVar[int] = _PROGRESS


@dataclass(frozen=True, slots=True)
class JobFinished(Fact):
    """The job reached its stop condition."""

    job: JobId
    generation: int
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobFailed(Fact):
    """The job failed and is not retried."""

    job: JobId
    generation: int
    error: str
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobCrashed(Fact):
    """The job lost its processes unexpectedly; it may be retried from `done`."""

    job: JobId
    generation: int
    done: Amount
    error: str
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class DeadlineMissed(Fact):
    """A job's deadline has passed; it keeps running."""

    job: JobId


@dataclass(frozen=True, slots=True)
class NodeJoined(Fact):
    """A node joined: a new one, or a lost one that came back under its old name.

    A new one may take the place of a lost one with equal banks, and with it the numbers of its devices.
    """

    name: str
    banks: tuple[tuple[str, int, int], ...] = ()  # (kind, number of devices, memory of each) of a new node
    supplies: tuple[int, ...] = ()  # its cores, RAM and disk from now on; empty: unchanged
    replaces: str = ""  # the lost node whose place a new one takes; empty: it gets a place of its own


@dataclass(frozen=True, slots=True)
class NodeLost(Fact):
    """A node was lost, with everything that ran on it."""

    node: NodeId
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class NodeDrained(NodeLost):
    """An operator took a node out: its jobs are released, and it gets no others until it is undrained."""


@dataclass(frozen=True, slots=True)
class NodeUndrained(NodeJoined):
    """An operator put a drained node back, under its name."""


@dataclass(frozen=True, slots=True)
class LinkMeasured(Fact):
    """The link between two nodes was measured."""

    one: str
    other: str
    bytes_per_s: Amount
    latency_s: Amount


class ForeignProcess(NamedTuple):
    """A process on one of our devices that carpool did not start."""

    pid: int
    user: str = ""  # empty: unknown
    program: str = ""
    memory_bytes: int = 0  # 0: unknown


@dataclass(frozen=True, slots=True)
class OutsidersSeen(Fact):
    """The foreign processes on a device from now on; none: the device is free of them again."""

    device: DeviceId
    processes: tuple[ForeignProcess, ...] = ()
    keeps_free: bool = True  # whether the device is left to them while no job holds it


@dataclass(frozen=True, slots=True)
class Woke(Fact):
    """The scheduler's `wake_at` has come."""


def in_folding_order(facts: Sequence[Fact]) -> list[Fact]:
    """Facts of one instant by rank, except that a cancel, pause or loss stays behind the arrival it refers to."""
    if _REVERSALS.isdisjoint(map(type, facts)):
        return sorted(facts, key=attrgetter("rank"))
    asked: set[JobId] = set()
    joined = False
    ranked: list[tuple[int, Fact]] = []
    for fact in facts:
        rank = fact.rank
        if isinstance(fact, JobSubmitted):
            asked.add(fact.spec.id)
        elif isinstance(fact, JobResumed):
            asked.add(fact.job)
        elif isinstance(fact, JobCancelled | JobPaused) and fact.job in asked:
            rank = _REQUESTS
        elif isinstance(fact, NodeLost) and joined:
            rank = _CHANGES
        joined = joined or isinstance(fact, NodeJoined)
        ranked.append((rank, fact))
    return [fact for _, fact in sorted(ranked, key=itemgetter(0))]


_REVERSALS = frozenset({JobCancelled, JobPaused, NodeLost, NodeDrained})


@dataclass(frozen=True, slots=True)
class Run:
    """An assignment to run the job."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An assignment to measure: the job runs `steps` steps alone, after as many to warm up, and reports.

    Other jobs on its devices are stopped meanwhile.
    """

    steps: int


RUN = Run()


@dataclass(frozen=True, slots=True)
class Assign:
    """Make the job hold exactly this allocation."""

    job: JobId
    allocation: Allocation
    generation: int
    purpose: Run | Probe = RUN


@dataclass(frozen=True, slots=True)
class Release:
    """Make the job hold nothing."""

    job: JobId
    generation: int


Order = Assign | Release


class Change(NamedTuple):
    """One job's new desired allocation; None releases it."""

    job: JobId
    allocation: Allocation | None
    purpose: Run | Probe = RUN


class Planned(NamedTuple):
    """A decision, its reason, and the expected rate of each change, in the order of the changes.

    For the jobs in `guessed` only ratios of rates were known.
    """

    reason: str
    changes: tuple[Change, ...] = ()
    believed: tuple[float, ...] = ()
    wake_at: float | None = None
    note: object = None
    guessed: tuple[JobId, ...] = ()


class Record(NamedTuple):
    """Facts of one instant, then at most one plan: a call of `Scheduler.handle`. The journal is a list of these."""

    at: float
    facts: Sequence[Fact]  # in folding order, then the failures that followed from them
    planned: Planned | None = None
    ignored: Sequence[Fact] = ()  # outdated: of an old generation or phase, or of a job that is over


@runtime_checkable
class Observer(Protocol):
    """Follows the scheduler record by record: a journal, metrics, a recording."""

    def record(self, record: Record) -> None:
        """Record one call of `Scheduler.handle`."""
