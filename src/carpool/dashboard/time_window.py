"""Time window of a timeline: start, end, ticks and navigation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from math import isfinite

LENGTHS = ((300.0, "5 min"), (3600.0, "1 h"), (21600.0, "6 h"), (86400.0, "1 d"), (604800.0, "7 d"))
DEFAULT_S = 3600.0

_SHORTEST_S, _LONGEST_S = 10.0, 366 * 86400.0
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis of time, in parts of the window."""

    place: float
    words: str


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From `since` to `until`, in Unix time; a live one ends now and goes along with it."""

    since: float
    until: float
    is_live: bool = True

    @classmethod
    def read(cls, query: Mapping[str, str], now: float) -> TimeWindow:
        """What the address asks for: `last` seconds, or `from` and `to`; what makes no sense is the last hour."""
        since, until = _seconds(query.get("from")), _seconds(query.get("to"))
        if since is not None and until is not None and until > since:
            until = min(until, now + _LONGEST_S)
            length = min(max(until - since, _SHORTEST_S), _LONGEST_S)
            return cls(until - length, until, is_live=False)
        last = _seconds(query.get("last"))
        length = DEFAULT_S if last is None else min(max(last, _SHORTEST_S), _LONGEST_S)
        return cls(now - length, now)

    @property
    def length(self) -> float:
        """Seconds."""
        return self.until - self.since

    def place(self, at: float) -> float:
        """Where an instant is in it, from 0 to 1; what is outside is at the edge."""
        return min(1.0, max(0.0, (at - self.since) / self.length))

    def at(self, place: float) -> float:
        """The inverse of `place`."""
        return self.since + place * self.length

    def moved(self, now: float, *, by: float = 0.0, zoom: float = 1.0) -> dict[str, str]:
        """The address of a window moved by so many of its lengths, or `zoom` times as long around the same middle.

        One that would end after now ends now, and is live.
        """
        length = min(max(self.length * zoom, _SHORTEST_S), _LONGEST_S)
        if self.is_live and by == 0.0:
            return {"last": f"{length:.0f}"}
        until = (self.since + self.until + length) / 2 + by * length
        if until >= now:
            return {"last": f"{length:.0f}"}
        return {"from": f"{until - length:.0f}", "to": f"{until:.0f}"}

    def ticks(self, zone: tzinfo, most: int = 7) -> list[Tick]:
        """Round times of day, at most so many."""
        step = next(
            (s for s in STEPS_S if self.length / s <= most), STEPS_S[-1] * (1 + int(self.length / 604800 / most))
        )
        offset = datetime.fromtimestamp(self.since, UTC).astimezone(zone).utcoffset()
        shift = offset.total_seconds() if offset is not None else 0.0
        first = -(-(self.since + shift) // step) * step - shift
        found = []
        for number in range(most + 1):
            at = first + number * step
            if at <= self.until:
                found.append(Tick(self.place(at), _words(at, zone, step)))
        return found


def _words(at: float, zone: tzinfo, step: float) -> str:
    there = datetime.fromtimestamp(at, UTC).astimezone(zone)
    if step >= 86400 or (there.hour, there.minute, there.second) == (0, 0, 0):
        return f"{there.day} {there:%b}"
    return f"{there:%H:%M:%S}" if step < 60 else f"{there:%H:%M}"


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) and 0.0 <= value < 1e11 else None
