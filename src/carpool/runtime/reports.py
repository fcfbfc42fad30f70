"""What an executor reports to whoever started it: facts for the scheduler, and what no scheduler needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.core.messages import Fact
from carpool.core.model import JobId


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one instant, for the scheduler."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """A training was loaded: its length is known from now on."""

    job: JobId
    total_steps: int | None  # None: only a target ends it
    batch_size: int = 0
    num_samples: int = 0
    target_loss: float | None = None  # it ends when the mean loss of `window` steps gets here
    window: int = 10


@dataclass(frozen=True, slots=True)
class Told:
    """Something for the job's story, in words."""

    job: JobId
    words: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a training measured of itself after so many steps."""

    job: JobId
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended; comes before the fact that says so."""

    job: JobId
    steps: int
    epochs: int
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    digest: str | None = None  # None for command jobs
    reason: str = ""  # in words
    samples_per_s: float | None = None
    memory_bytes: int | None = None  # that one of its workers held at most


@dataclass(frozen=True, slots=True)
class Gone:
    """The executor is no longer there."""

    reason: str


Report = Facts | Sized | Told | Evaluation | Outcome | Gone
