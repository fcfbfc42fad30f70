"""Facts that the coordinator folds, orders that it gives, and the records of its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from carpool.core.model import Kind
from carpool.core.typed_fields import Amount, Measured, Range
from carpool.federated.federation import DeviceName, TaskName

Count = Annotated[int, Range(0, 1 << 40)]


class Outcome(StrEnum):
    """Outcome of a device's update."""

    ACCEPTED = "accepted"
    NOT_FINITE = "not finite"
    OVERSIZED = "oversized"
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    NORM_EXCEEDED = "norm exceeded"
    UNREADABLE = "unreadable"
    NO_WORK = "no work"  # no complete step before the deadline
    FAILED = "failed"  # the device could not train
    STALE = "stale"  # of an earlier cycle
    DUPLICATE = "duplicate"
    NOT_ORDERED = "not ordered"  # unknown device or task, or work that was not asked for
    INFLATED = "inflated"  # claims more samples than were ordered, or steps that do not fit its samples


class Work(NamedTuple):
    """One task's part of a device's cycle."""

    task: TaskName
    round: int
    start: int  # samples of this task that the device has processed before
    samples: int
    batch_size: int
    share: float
    runs: int = 1  # independent runs from the round's weights, whose weights are averaged

    def runs_begun(self, samples: int) -> int:
        """The number of runs begun after `samples` samples."""
        return max(1, -(-samples * self.runs // self.samples))

    def can_take(self, steps: int, samples: int, volume: int) -> bool:
        """Whether a device that holds `volume` samples can process this number of samples in this number of steps.

        All steps are full except the last of an epoch and of a run, so at least every second one is.
        """
        full = min(self.batch_size, volume) or 1
        return -(-samples // self.batch_size) <= steps <= 2 * (-(-samples // full) + self.runs)


class TaskResult(NamedTuple):
    """What a device reports of one task; the update itself stays at the edge."""

    task: TaskName
    round: Count
    samples: Count = 0
    steps: Count = 0
    busy_s: Amount = 0.0  # that the device spent on this task
    num_bytes: Count = 0
    loss: Measured = 0.0
    outcome: str = Outcome.ACCEPTED  # of the checks of its content
    detail: str = ""


class Fact:
    """Base class of all facts."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DeviceJoined(Fact):
    """A device has joined or is back; `volumes` are its samples of each task."""

    device: DeviceName
    kind: Kind
    volumes: Mapping[str, int]
    sample_s: Mapping[str, Amount] = field(default_factory=dict)  # measured seconds per sample alone; missing: unknown
    cores: Annotated[int, Range(1, 1 << 20)] = 1  # how many of its tasks run side by side
    load_s: Mapping[str, Amount] = field(default_factory=dict)  # to give a task another lane; empty: it has no lanes


@dataclass(frozen=True, slots=True)
class DeviceLost(Fact):
    """A device no longer answers."""

    device: DeviceName
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkReported(Fact):
    """A device's results of a cycle: all of its tasks in one message."""

    device: DeviceName
    cycle: Count
    results: tuple[TaskResult, ...]


@dataclass(frozen=True, slots=True)
class Evaluated(Fact):
    """Metrics of a task's weights after `rounds` rounds."""

    task: TaskName
    rounds: Count
    metrics: Mapping[str, Measured] = field(default_factory=dict)


class Order:
    """Base class of all orders."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StartWork(Order):
    """Send a device the weights of its tasks and let it work. A repeated order is for a device that came back."""

    device: DeviceName
    cycle: int
    work: tuple[Work, ...]
    deadline_s: Amount = 0.0  # from now; 0: none
    planned_s: Amount = 0.0  # that it should take; 0: unknown
    in_turn: bool = False  # its tasks follow one another, although they have lanes


@dataclass(frozen=True, slots=True)
class CloseCycle(Order):
    """The cycle is over; devices that have not reported stop."""

    cycle: int
    missing: tuple[DeviceName, ...] = ()


@dataclass(frozen=True, slots=True)
class Aggregate(Order):
    """Make the next weights of a task from these devices' updates, in this order."""

    task: TaskName
    round: int
    devices: tuple[DeviceName, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RepeatRound(Order):
    """A round had too few accepted updates: its task keeps its weights."""

    task: TaskName
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndTask(Order):
    """A task is over."""

    task: TaskName
    reason: str
    failed: bool = False


class Refusal(NamedTuple):
    """An update that was not accepted."""

    device: DeviceName
    task: TaskName
    round: Count
    outcome: str
    detail: str = ""


class Record(NamedTuple):
    """One call of the coordinator: its facts, what it refused, and its orders."""

    at: float
    facts: Sequence[Fact]
    orders: Sequence[Order] = ()
    refused: Sequence[Refusal] = ()
