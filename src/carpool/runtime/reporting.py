"""What an executor says: facts of one instant together, and facts behind every outcome."""

from __future__ import annotations

from collections.abc import Callable

from carpool.core.messages import Fact
from carpool.runtime.reports import Facts, Outcome, Report


class Reporting:
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
