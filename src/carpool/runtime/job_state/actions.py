"""Actions that a job's state machine returns; the executor carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.core.messages import Fact
from carpool.core.model import WHOLE, JobId
from carpool.runtime.executor.reports import Outcome
from carpool.runtime.process.protocol import Message


@dataclass(frozen=True, slots=True)
class Segment:
    """Shared memory of an epoch's ranks, created on first use; a new key replaces the previous segment."""

    key: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Mirror:
    """A memory file for a job's state, created on first use and kept until `DropMirror`."""

    key: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker on a device."""

    worker: int
    device: int
    threads: int
    lane: int = WHOLE  # percent of the device


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a worker, with the descriptor of a memory file."""

    worker: int
    message: Message
    memory: Segment | Mirror | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker's process."""

    worker: int


@dataclass(frozen=True, slots=True)
class DropMirror:
    """Free a mirror."""

    mirror: Mirror
    reusable: bool = False  # no worker can be writing to it any longer


@dataclass(frozen=True, slots=True)
class CopyMirror:
    """Copy a complete mirror to disk, for other machines to fetch."""

    mirror: Mirror


@dataclass(frozen=True, slots=True)
class Note:
    """Add a line to the job's story."""

    text: str


@dataclass(frozen=True, slots=True)
class Emit:
    """Report a fact to the scheduler."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class RequestExclusive:
    """Pause all other jobs on a device until `ReleaseExclusive`; answered by `JobMachine.exclusive_granted`."""

    device: int
    release_memory: bool = True  # the other jobs also free their cached memory


@dataclass(frozen=True, slots=True)
class ReleaseExclusive:
    """Resume the other jobs."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How steps are split over devices from a step on; in default mode replayed steps use the same split."""

    step: int
    devices: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """Most samples of a micro-batch from a step on: more ran out of memory."""

    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a record to disk, beside the checkpoints."""

    record: BatchSplit | MicroBatchLimit


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
    memory_bytes: int = 0  # peak of one worker; 0: unknown

    def outcome(self, job: JobId) -> Outcome:
        result = (self.steps, self.epochs, self.loss, self.metrics, self.digest, self.reason)
        return Outcome(job, *result, self.samples_per_s or None, self.memory_bytes or None)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job was stopped and has no process left; it can be resumed."""

    steps: int


Action = (
    Start
    | Send
    | Kill
    | CopyMirror
    | DropMirror
    | Note
    | Emit
    | RequestExclusive
    | ReleaseExclusive
    | Persist
    | Ended
    | Stopped
)
