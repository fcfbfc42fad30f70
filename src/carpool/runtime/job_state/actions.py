"""Actions that a job's state machine returns; the executor carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.runtime.executor.reports import Outcome
from carpool.runtime.process.protocol import Message
from carpool.runtime.sharing.lanes import WHOLE


@dataclass(frozen=True, slots=True)
class Segment:
    """The shared memory of a formation, made when its key is first named; a new key takes the old one's place."""

    key: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """A memory file for a job's state, made when it is first named and kept until it is dropped."""

    key: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker on a device and let it begin."""

    worker: int
    device: int
    threads: int
    lane: int = WHOLE  # percent of the device


@dataclass(frozen=True, slots=True)
class Send:
    """Say something to a worker."""

    worker: int
    message: Message
    beside: Segment | Mirror | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker's process now."""

    worker: int


@dataclass(frozen=True, slots=True)
class Drop:
    """A mirror is no longer needed."""

    mirror: Mirror
    reusable: bool = False  # nobody can be writing to it any more


@dataclass(frozen=True, slots=True)
class Tell:
    """Words for the job's story."""

    words: str


@dataclass(frozen=True, slots=True)
class Emit:
    """A fact for the scheduler."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class RequestExclusive:
    """Let every other job on a device stand still until `ReleaseExclusive`, and answer with `JobMachine.left_alone`."""

    device: int
    clears: bool = True  # they give back the memory that they only keep for later


@dataclass(frozen=True, slots=True)
class ReleaseExclusive:
    """The neighbours may go on."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How steps are cut over the devices from a step on: default mode replays with the same parts."""

    step: int
    devices: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """From a step on no pass has more samples than this: more did not fit into memory."""

    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class Write:
    """Keep a cut or a split durably, beside the checkpoints."""

    what: BatchSplit | MicroBatchLimit


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over and has no process left."""

    reason: str
    steps: int = 0
    epochs: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    digest: str | None = None
    samples_per_s: float = 0.0
    memory_bytes: int = 0  # that one of its workers held at most; 0: unknown

    def outcome(self, job: JobId) -> Outcome:
        """As it is reported."""
        figures = (self.steps, self.epochs, self.loss, self.metrics, self.digest, self.reason)
        return Outcome(job, *figures, self.samples_per_s or None, self.memory_bytes or None)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The team was stopped and has no process left; its job is not over."""

    steps: int


Action = Start | Send | Kill | Drop | Tell | Emit | RequestExclusive | ReleaseExclusive | Write | Ended | Stopped
