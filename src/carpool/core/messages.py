"""Scheduler messages: facts, orders and records, and the observer of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from carpool.core.model import Allocation, DeviceId, JobId, JobSpec, NodeId

# ---------------------------------------------------------------------------------------------------------- facts
# Facts that share an instant are folded by rank: how running jobs stood, then what frees devices, then what changes
# the cluster, then what asks for devices.
_STOOD, _FREES, _CHANGES, _ASKS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that has happened. The instant is given once for a whole batch, by `Scheduler.handle`."""

    rank: ClassVar[int] = _CHANGES


@dataclass(frozen=True, slots=True)
class JobSubmitted(Fact):
    """A user asked for a job."""

    spec: JobSpec
    rank: ClassVar[int] = _ASKS


@dataclass(frozen=True, slots=True)
class JobCancelled(Fact):
    """A user withdrew a job."""

    job: JobId
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobPaused(Fact):
    """A user took a job off its devices until further notice."""

    job: JobId
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobResumed(Fact):
    """A user put a paused job back into the queue."""

    job: JobId
    rank: ClassVar[int] = _ASKS


@dataclass(frozen=True, slots=True)
class WeightChanged(Fact):
    """A user gave a job another weight."""

    job: JobId
    weight: float
    rank: ClassVar[int] = _ASKS


@dataclass(frozen=True, slots=True)
class LimitsChanged(Fact):
    """A user gave a job another range of devices."""

    job: JobId
    min_devices: int
    max_devices: int
    rank: ClassVar[int] = _ASKS


@dataclass(frozen=True, slots=True)
class PolicyChanged(Fact):
    """From now on another policy decides; what it finds is what the one before it left."""

    policy: str  # as it was written
    fault: str = ""  # of the one before, where that is why


@dataclass(frozen=True, slots=True)
class AssignApplied(Fact):
    """The job works under this generation's allocation from now on, with `done` units of work behind it."""

    job: JobId
    generation: int
    done: float
    rank: ClassVar[int] = _STOOD


@dataclass(frozen=True, slots=True)
class ReleaseApplied(Fact):
    """The job has left its devices with `done` units of work kept."""

    job: JobId
    generation: int
    done: float
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class ProgressReported(Fact):
    """A measurement of a running job: work done, rate since the last report, and what the training says of itself."""

    job: JobId
    generation: int
    done: float
    rate: float
    loss: float | None = None
    noise: float | None = None  # gradient noise scale, in samples
    step_s: float | None = None  # seconds of one step, synchronisation included
    sync_s: float | None = None  # of these, seconds of synchronisation that nothing hid
    alone: bool = False  # a probe measured it, while whoever shares its devices stood still
    memory_bytes: int = 0  # most that a worker of it has held on a device so far; 0: not told
    rank: ClassVar[int] = _STOOD


@dataclass(frozen=True, slots=True)
class JobFinished(Fact):
    """The job reached its stop condition."""

    job: JobId
    generation: int
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobFailed(Fact):
    """The job ended by its own fault and is not tried again."""

    job: JobId
    generation: int
    error: str
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class JobCrashed(Fact):
    """The job lost its processes through no decision of ours; it may be tried again from `done`."""

    job: JobId
    generation: int
    done: float
    error: str
    rank: ClassVar[int] = _FREES


@dataclass(frozen=True, slots=True)
class DeadlineMissed(Fact):
    """The time by which a job should have finished has passed; it goes on."""

    job: JobId


@dataclass(frozen=True, slots=True)
class NodeJoined(Fact):
    """A node is there: a new one, or a lost one that came back under its old name."""

    name: str
    banks: tuple[tuple[str, int, int], ...] = ()  # (kind, number of devices, memory of each) of a new node
    supplies: tuple[int, ...] = ()  # its cores, RAM and disk, as they are from now on; empty: as they were


@dataclass(frozen=True, slots=True)
class NodeLost(Fact):
    """A node no longer answers; whatever ran on it is gone."""

    node: NodeId
    rank: ClassVar[int] = _FREES


class ForeignProcess(NamedTuple):
    """A process that computes on one of our devices and is none of ours."""

    pid: int
    user: str = ""  # empty: not told
    program: str = ""
    memory_bytes: int = 0  # 0: not told


@dataclass(frozen=True, slots=True)
class OutsidersSeen(Fact):
    """These processes of others compute on a device from now on; nobody does any more where there are none."""

    device: DeviceId
    processes: tuple[ForeignProcess, ...] = ()
    keeps_free: bool = True  # whether it is left to them while nobody of ours is there


@dataclass(frozen=True, slots=True)
class Woke(Fact):
    """The time that the scheduler asked to be woken at has come."""


def in_folding_order(facts: Sequence[Fact]) -> list[Fact]:
    """Facts of one instant by rank, but a wish or a loss that followed an arrival of the same batch stays behind it."""
    if _SECOND_THOUGHTS.isdisjoint(map(type, facts)):
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
            rank = _ASKS
        elif isinstance(fact, NodeLost) and joined:
            rank = _CHANGES
        joined = joined or isinstance(fact, NodeJoined)
        ranked.append((rank, fact))
    return [fact for _, fact in sorted(ranked, key=itemgetter(0))]


_SECOND_THOUGHTS = frozenset({JobCancelled, JobPaused, NodeLost})


# --------------------------------------------------------------------------------------------------------- orders
@dataclass(frozen=True, slots=True)
class Run:
    """An assignment made so that the job gets on."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An assignment made to measure: the job runs this many steps and reports, while others on its device stand still.

    As many steps before them warm up.
    """

    steps: int


RUN = Run()


@dataclass(frozen=True, slots=True)
class Assign:
    """Let the job hold exactly this allocation."""

    job: JobId
    allocation: Allocation
    generation: int
    purpose: Run | Probe = RUN


@dataclass(frozen=True, slots=True)
class Release:
    """Let the job hold nothing."""

    job: JobId
    generation: int


Order = Assign | Release


# ---------------------------------------------------------------------------------------------------------- plans
class Change(NamedTuple):
    """One job's new desired allocation; None takes it off its devices."""

    job: JobId
    allocation: Allocation | None
    purpose: Run | Probe = RUN


class Planned(NamedTuple):
    """What was decided, why, and what was believed: the rate expected of each change, in the order of the changes.

    Of jobs that are only `guessed` it was not known how fast they are, only how places compare.
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
    facts: Sequence[Fact]  # in the order they were folded, then the failures that followed from them
    planned: Planned | None = None
    ignored: Sequence[Fact] = ()  # of a generation or a phase that no longer counts, or of a job that is over


@runtime_checkable
class Observer(Protocol):
    """Follows the scheduler record by record: a journal, metrics, a recording."""

    def record(self, record: Record) -> None:
        """Take in one call of `Scheduler.handle`."""
        ...
