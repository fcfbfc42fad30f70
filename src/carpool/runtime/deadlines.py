"""When a job should have finished: a length of time, or a moment of the calendar."""

from __future__ import annotations

import time
from datetime import datetime

from carpool.core.errors import InputError
from carpool.core.units import parse_seconds


def parse_deadline(value: object, where: str, now: float | None = None) -> float:
    """Seconds from now: given as such (``8h``), or by a moment (``2027-03-01 08:00``, local unless it says where)."""
    moment = _moment(value)
    if moment is None:
        seconds = parse_seconds(value, where) if not isinstance(value, str) or value[:1].isdigit() else 0.0
    else:
        seconds = moment.timestamp() - (time.time() if now is None else now)
    if seconds <= 0.0:
        problem = f"{value!r} is past" if moment is not None else f"{value!r} is no time to come"
        raise InputError(problem, where=where, way_out="Give a length of time such as 8h, or a moment to come.")
    return seconds


def _moment(value: object) -> datetime | None:
    """The moment that a value names; None where it is no moment."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) and "-" in value else None
    except ValueError:
        return None
