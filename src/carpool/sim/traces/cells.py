"""Parsers for single cells of a trace file, with errors that name the cell and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

_SHOWN = 60  # characters of a bad value that are printed


class BadRow(Exception):
    """An invalid row; `reason` is equal for all rows with this fault, `problem` names the value."""

    def __init__(self, problem: str, reason: str, column: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.reason = reason
        self.column = column


class BadCell(BadRow):
    """An invalid cell: `what` completes the sentences '<value> …' and '<column> …'."""

    def __init__(self, column: str, value: str, what: str) -> None:
        super().__init__(f"{shown(value)} {what}", f"{column} {what}", column)


class UnusableRow(Exception):
    """A row that its format marks as useless to a scheduler (no GPU, no end time)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


NO_GPU = "no GPU"
NO_END = "no end time"
NOT_STARTED = "never started"


def shown(value: str) -> str:
    """A value for a message: quoted, control characters escaped, shortened."""
    return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…")


def number(text: str, column: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        raise BadCell(column, text, "is not a number" if text.strip() else "is empty") from None
    if not math.isfinite(value):
        raise BadCell(column, text, "is not finite")
    if value < 0:
        raise BadCell(column, text, "is negative")
    return value


def positive(text: str, column: str) -> float:
    """A finite number above 0."""
    value = number(text, column)
    if value == 0:
        raise BadCell(column, text, "is not above 0")
    return value


def whole(text: str, column: str) -> int:
    """A whole number of 0 or more; '2.0' is whole."""
    value = number(text, column)
    if not value.is_integer():
        raise BadCell(column, text, "is not a whole number")
    return int(value)


def count(text: str, column: str) -> int:
    """A whole number of 1 or more."""
    value = whole(text, column)
    if value < 1:
        raise BadCell(column, text, "is less than 1")
    return value


def stamp(text: str, column: str) -> float:
    """A date and time in ISO form as seconds since 1970; without a zone it is taken as UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        what = "is not a date like 2017-10-09 07:01:55" if text.strip() else "is empty"
        raise BadCell(column, text, what) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


class Cells:
    """The cells of one row by column name; one object serves all rows, `fields` changes."""

    __slots__ = ("fields", "index", "places")

    def __init__(self, places: Mapping[str, int]) -> None:
        self.places = places
        self.fields: Sequence[str] = ()
        self.index = 0  # of the row among the rows of the file, from 0

    def text(self, column: str) -> str:
        place = self.places.get(column)
        return "" if place is None else self.fields[place]

    def name(self, column: str) -> str:
        """The cell's text, which may not be empty."""
        text = self.fields[self.places[column]]
        if not text:
            raise BadCell(column, text, "is empty")
        return text

    def is_empty(self, column: str) -> bool:
        return self.text(column).strip().lower() in _NOTHING

    def number(self, column: str) -> float:
        return number(self.fields[self.places[column]], column)

    def positive(self, column: str) -> float:
        return positive(self.fields[self.places[column]], column)

    def whole(self, column: str) -> int:
        return whole(self.fields[self.places[column]], column)

    def count(self, column: str) -> int:
        return count(self.fields[self.places[column]], column)

    def stamp(self, column: str) -> float:
        return stamp(self.fields[self.places[column]], column)


_NOTHING = frozenset({"", "none", "null", "nan", "na", "nat"})
