"""Text formatting: durations, counts, memory, percentages, and a stable colour for each job."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from math import isfinite
from zlib import crc32

from carpool.sim.report.units import digits

UNKNOWN = "–"

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(seconds: float | None) -> str:
    """Format a duration in one or two units: 3 h 20 min, 45 s."""
    if seconds is None or not isfinite(seconds):
        return UNKNOWN
    if seconds < 1.0:
        return "0 s" if seconds < 0.001 else f"{digits(seconds)} s"
    left = round(seconds)
    for index, (size, name) in enumerate(_UNITS):
        if left >= size:
            whole, rest = divmod(left, size)
            if name == "s" or whole >= 10:
                return f"{round(left / size)} {name}"
            smaller, smaller_name = _UNITS[index + 1]
            part = rest // smaller
            return f"{whole} {name} {part} {smaller_name}" if part else f"{whole} {name}"
    return "0 s"


def exact_duration(seconds: float) -> str:
    """Format a duration in as many units as it has: 10 h 30 min, 1.5 s. For round values, such as those of an axis."""
    parts, left = [], max(seconds, 0.0)
    for size, name in _UNITS[:-1]:
        whole, left = divmod(left, size)
        parts += [f"{whole:.0f} {name}"] if whole else []
    return " ".join([*parts, f"{plain(left)} s"] if left or not parts else parts)


def rough(seconds: float) -> str:
    """Format a duration in one unit, for uncertain values."""
    size, name = next(((size, name) for size, name in _UNITS if seconds >= size), _UNITS[-1])
    return f"{max(1, round(seconds / size))} {name}"


def count(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """Format a number with three significant digits."""
    return UNKNOWN if value is None or not isfinite(value) else digits(value)


def plain(value: float) -> str:
    """Format a number with up to six significant digits."""
    return f"{value:,.6g}"


def percent(part: float | None) -> str:
    """Format a fraction in per cent; 0 % and 100 % are shown for exactly these only."""
    if part is None:
        return UNKNOWN
    shown = round(100 * part)
    if part > 0.0:
        shown = max(1, shown)
    return f"{100 if part >= 1.0 else min(99, shown)} %"


def memory(size: int) -> str:
    """Format bytes in a binary unit."""
    for unit, name in _BYTES:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B" if size else UNKNOWN


def moment(at: float, zone: tzinfo, now: float) -> str:
    """Format an instant: the time of day, or the date and time if it is not today."""
    local, today = (datetime.fromtimestamp(each, UTC).astimezone(zone) for each in (at, now))
    if local.date() == today.date():
        return f"{local:%H:%M:%S}"
    return f"{local.day} {local:%b %H:%M}"


def stamp(at: float) -> str:
    """Format an instant for the HTML attribute `datetime`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


NUM_COLOURS = 18  # classes c0 … in the style sheet


def colour(job: str) -> str:
    """CSS class of a job's colour; jobs of other users, whose names are hidden, share one."""
    return f"c{crc32(job.encode()) % NUM_COLOURS}" if job else "other-user"
