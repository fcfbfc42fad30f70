"""What the outside must offer: a backend that carries orders out, a clock, a place to keep records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from carpool.core.messages import Fact, Order, Record


class Backend(Protocol):
    """Carries orders out and answers with facts: at once where it can, later through its own channel where not."""

    def apply(self, at: float, orders: Sequence[Order]) -> Sequence[Fact]:
        """Start carrying out orders; facts that hold already at `at` are returned."""
        ...


class Clock(Protocol):
    """Tells the time, in seconds from an origin of its own."""

    def now(self) -> float:
        """Seconds since the origin."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Follows the scheduler record by record: a journal, metrics, a recording."""

    def record(self, record: Record) -> None:
        """Take in one call of `Scheduler.handle`."""
        ...


class JournalStore(Observer, Protocol):
    """Keeps records durably and gives them back in order."""

    def records(self) -> Iterable[Record]:
        """Every record kept, oldest first."""
        ...
