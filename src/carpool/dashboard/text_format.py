"""Text formatting: durations, counts, memory, percentages, and a stable colour for each job."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from math import isfinite
from zlib import crc32

from carpool.service.queries.views import TimeEstimate
from carpool.sim.report.units import digits

NOTHING = "–"

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(seconds: float | None) -> str:
    """A length of time in its largest unit, with the next one where it says something: 3 h 20 min, 45 s."""
    if seconds is None or not isfinite(seconds):
        return NOTHING
    if seconds < 1.0:
        return "0 s" if seconds < 0.001 else f"{digits(seconds)} s"
    left = round(seconds)
    for place, (size, name) in enumerate(_UNITS):
        if left >= size:
            whole, rest = divmod(left, size)
            if name == "s" or whole >= 10:
                return f"{round(left / size)} {name}"
            smaller, smaller_name = _UNITS[place + 1]
            part = rest // smaller
            return f"{whole} {name} {part} {smaller_name}" if part else f"{whole} {name}"
    return "0 s"


def rough(seconds: float) -> str:
    """A length of time in one unit: what is uncertain by minutes is not told to the second."""
    size, name = next(((size, name) for size, name in _UNITS if seconds >= size), _UNITS[-1])
    return f"{max(1, round(seconds / size))} {name}"


def expected(ends_in: TimeEstimate | None) -> str:
    """Seconds until something, with their spread in the same breath: 12 min ± 40 s."""
    return NOTHING if ends_in is None else f"{duration(ends_in.mean_s)} ± {rough(ends_in.std_s)}"


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """Three significant digits."""
    return NOTHING if value is None or not isfinite(value) else digits(value)


def plain(value: float) -> str:
    """A number with no more digits than it needs, six at most."""
    return f"{value:,.6g}"


def percent(part: float | None) -> str:
    """A part of a whole; what has begun is never 0 %, and what is not over never 100 %."""
    if part is None:
        return NOTHING
    shown = round(100 * part)
    if part > 0.0:
        shown = max(1, shown)
    return f"{100 if part >= 1.0 else min(99, shown)} %"


def memory(size: int) -> str:
    """Bytes in a binary unit."""
    for unit, name in _BYTES:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B" if size else NOTHING


def moment(at: float, zone: tzinfo, now: float) -> str:
    """An instant: the time of day, with the date where it is another day than now."""
    there, here = (datetime.fromtimestamp(each, UTC).astimezone(zone) for each in (at, now))
    if there.date() == here.date():
        return f"{there:%H:%M:%S}"
    return f"{there.day} {there:%b %H:%M}"


def stamp(at: float) -> str:
    """An instant for machines, as the attribute `datetime` wants it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


NUM_COLOURS = 18  # classes c0 … in the style sheet: far enough apart in either theme


def colour(job: str) -> str:
    """The style class of a job's colour; somebody else's jobs are all alike."""
    return f"c{crc32(job.encode()) % NUM_COLOURS}" if job else "theirs"
