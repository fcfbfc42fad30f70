"""Reports that are lost by nobody's death and heard once: numbered, kept until acknowledged, sent again; pure.

An executor puts every report into its outbox. Whoever hears it keeps the number of the last one together with what
followed from it, in one commit, and acknowledges it only then. After a crash of the hearer the next one says which
number it knows, and gets what came behind it: nothing is lost, and what comes a second time is known by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from carpool.core.errors import CarpoolError
from carpool.runtime.reports import Report


class Numbered(NamedTuple):
    """A report and its number, from 1 on."""

    number: int
    report: Report


class Outbox:
    """What has been reported and not been acknowledged, in order."""

    def __init__(self) -> None:
        self._kept: deque[Numbered] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Numbered]:
        return iter(self._kept)

    def put(self, report: Report) -> Numbered:
        """Keep a report; with its number."""
        self._last += 1
        numbered = Numbered(self._last, report)
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
