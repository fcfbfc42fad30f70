"""Executor reports: their types, batching by instant, and numbered delivery until acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from carpool.core.errors import CarpoolError
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


class ReportBatcher:
    """Passes reports on at once, and facts when all that happened at an instant is known."""

    def __init__(self, pass_on: Callable[[Report], None]) -> None:
        self._pass_on = pass_on
        self._facts: list[Fact] = []
        self._has_ended = False  # somebody, and its outcome has been told

    def report(self, report: Report) -> None:
        """Say something now."""
        self._pass_on(report)
        self._has_ended |= isinstance(report, Outcome)

    def emit(self, fact: Fact) -> None:
        """A fact of this instant."""
        self._facts.append(fact)

    def flush(self) -> None:
        """The instant is over: its facts go together; facts, if only none, follow every outcome."""
        if self._facts or self._has_ended:
            facts, self._facts, self._has_ended = self._facts, [], False
            self._pass_on(Facts(tuple(facts)))


# An executor puts every report into its outbox. Whoever hears it keeps the number of the last one together with what
# followed from it, in one commit, and acknowledges it only then. After a crash of the hearer the next one says which
# number it knows, and gets what came behind it: nothing is lost, and what comes a second time is known by its number.


class NumberedReport(NamedTuple):
    """A report and its number, from 1 on."""

    number: int
    report: Report


class Outbox:
    """What has been reported and not been acknowledged, in order."""

    def __init__(self) -> None:
        self._kept: deque[NumberedReport] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[NumberedReport]:
        return iter(self._kept)

    def put(self, report: Report) -> NumberedReport:
        """Keep a report; with its number."""
        self._last += 1
        numbered = NumberedReport(self._last, report)
        self._kept.append(numbered)
        return numbered

    def acknowledge(self, number: int) -> None:
        """Everything up to a number is in good hands."""
        while self._kept and self._kept[0].number <= number:
            self._kept.popleft()


class Receipts:
    """What a hearer has taken in: each number once, and none left out."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def is_new(self, number: int) -> bool:
        """Whether a report has not been taken in before; from now on it has."""
        if number <= self.last:
            return False
        if number != self.last + 1:
            raise CarpoolError(f"report {number} came after report {self.last}: what is between them is lost")
        self.last = number
        return True
