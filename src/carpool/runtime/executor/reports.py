"""Executor reports: their types, batching by instant, and numbered delivery until acknowledged.

The executor numbers every report and keeps it in its outbox. The client stores the number of the last report together
with its effects in one commit, and acknowledges it only then. After a crash the next client names the last number it
has, and receives everything after it: nothing is lost, and duplicates are recognized by their number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from carpool.core.errors import CarpoolError
from carpool.core.messages import Fact
from carpool.core.model import JobId
from carpool.core.typed_fields import Amount, Measured


class InvalidReport(NamedTuple):
    """A report with a value out of range, which ends its job."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one instant, for the scheduler."""

    facts: tuple[Fact, ...]
    invalid: tuple[InvalidReport, ...] = ()  # added by the client; never sent


@dataclass(frozen=True, slots=True)
class Sized:
    """The length of a training, known once it is loaded."""

    job: JobId
    total_steps: int | None  # None: only a target ends it
    batch_size: int = 0
    num_samples: int = 0
    target_loss: Measured | None = None  # training ends when the mean loss of `window` steps reaches it
    window: int = 10
    gradient_bytes: int = 0  # that each of its devices contributes to a step; 0: unknown


@dataclass(frozen=True, slots=True)
class Told:
    """A line of a job's story."""

    job: JobId
    words: str
    is_warning: bool = False  # shown with the job until its end


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of a training after a step."""

    job: JobId
    step: int
    metrics: Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a training; precedes the fact that ends the job."""

    job: JobId
    steps: int
    epochs: int
    loss: Measured | None
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    digest: str | None = None  # None for command jobs
    reason: str = ""
    samples_per_s: Amount | None = None
    memory_bytes: int | None = None  # peak of one worker


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A job's state is on disk and the executor has dropped the job: another one may continue it."""

    job: JobId
    steps: int  # of a training: in its newest checkpoint


@dataclass(frozen=True, slots=True)
class Gone:
    """The executor has exited."""

    reason: str


Report = Facts | Sized | Told | Evaluation | Outcome | HandedOver | Gone


class ReportBatcher:
    """Delivers reports at once, and the facts of an instant together."""

    def __init__(self, deliver: Callable[[Report], None]) -> None:
        self._deliver = deliver
        self._facts: list[Fact] = []
        self._has_outcome = False

    def report(self, report: Report) -> None:
        self._deliver(report)
        self._has_outcome |= isinstance(report, Outcome)

    def emit(self, fact: Fact) -> None:
        self._facts.append(fact)

    def flush(self) -> None:
        """Deliver the facts of this instant; facts, possibly none, follow every outcome."""
        if self._facts or self._has_outcome:
            facts, self._facts, self._has_outcome = self._facts, [], False
            self._deliver(Facts(tuple(facts)))


class NumberedReport(NamedTuple):
    """A report and its number, from 1 on."""

    number: int
    report: Report


class Outbox:
    """Reports that have not been acknowledged, in order."""

    def __init__(self) -> None:
        self._kept: deque[NumberedReport] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[NumberedReport]:
        return iter(self._kept)

    def put(self, report: Report) -> NumberedReport:
        self._last += 1
        numbered = NumberedReport(self._last, report)
        self._kept.append(numbered)
        return numbered

    def acknowledge(self, number: int) -> None:
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()


class Receipts:
    """Numbers of received reports: each is accepted once, and none may be missing."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def is_new(self, number: int) -> bool:
        """Accept a number; False if it was accepted before."""
        if number <= self.last:
            return False
        if number != self.last + 1:
            raise CarpoolError(f"report {number} followed report {self.last}: the reports between them are lost")
        self.last = number
        return True
