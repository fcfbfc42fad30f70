"""Reading whole columns fast; anything odd raises `Strange` or `BadRow`, and the careful reader takes over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from carpool.sim.traces.format import Strange

Value = TypeVar("Value")
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the traces' dates have no zone


def numbers(texts: Sequence[str]) -> list[float]:
    """Finite numbers of 0 or more."""
    try:
        values = list(map(float, texts))
    except ValueError as error:
        raise Strange from error
    # A sum is finite only if each value is (one that overflows merely costs a second, careful reading).
    if not (min(values) >= 0 and math.isfinite(sum(values))):
        raise Strange
    return values


def stamps(texts: Sequence[str]) -> list[float]:
    """Dates without a zone as seconds since 1970."""
    try:
        return [(at - _EPOCH).total_seconds() for at in map(datetime.fromisoformat, texts)]
    except (ValueError, TypeError) as error:  # TypeError: a date with a zone
        raise Strange from error


def shared(texts: Sequence[str], column: str, parse: Callable[[str, str], Value]) -> list[Value]:
    """Values of a column with few distinct ones: each is parsed once, and one object serves all equal cells."""
    values = {text: parse(text, column) for text in set(texts)}
    return list(map(values.__getitem__, texts))


def names(texts: Sequence[str]) -> list[str]:
    """Repeated names, one object for all equal cells."""
    first: dict[str, str] = {}
    return list(map(first.setdefault, texts, texts))


def row_ids(start: int, num_rows: int) -> list[str]:
    """Ids for rows that have none: their index in the file."""
    return list(map(str, range(start, start + num_rows)))
