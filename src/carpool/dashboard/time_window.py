"""Time window of a timeline: start, end, ticks and navigation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from math import isfinite

LENGTHS = ((300.0, "5 min"), (3600.0, "1 h"), (21600.0, "6 h"), (86400.0, "1 d"), (604800.0, "7 d"))
DEFAULT_S = 3600.0

_MIN_S, _MAX_S = 10.0, 366 * 86400.0
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


@dataclass(frozen=True, slots=True)
class Tick:
    """Axis tick: its position as a fraction of the axis, and its label."""

    position: float
    label: str


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Time range from `since` to `until` in Unix time; a live window ends now and moves on."""

    since: float
    until: float
    is_live: bool = True

    @classmethod
    def read(cls, query: Mapping[str, str], now: float) -> TimeWindow:
        """Parse a query: `last` seconds, or `from` and `to`; the last hour if it is invalid."""
        since, until = _seconds(query.get("from")), _seconds(query.get("to"))
        if since is not None and until is not None and until > since:
            until = min(until, now + _MAX_S)
            length = min(max(until - since, _MIN_S), _MAX_S)
            return cls(until - length, until, is_live=False)
        last = _seconds(query.get("last"))
        length = DEFAULT_S if last is None else min(max(last, _MIN_S), _MAX_S)
        return cls(now - length, now)

    @property
    def length(self) -> float:
        return self.until - self.since

    def position(self, at: float) -> float:
        """Position of an instant as a fraction from 0 to 1, clamped."""
        return min(1.0, max(0.0, (at - self.since) / self.length))

    def moved(self, now: float, *, by: float = 0.0, zoom: float = 1.0) -> dict[str, str]:
        """Query of a window shifted by `by` times its length, or scaled by `zoom` around its centre.

        A window that would end in the future is live instead.
        """
        length = min(max(self.length * zoom, _MIN_S), _MAX_S)
        if self.is_live and by == 0.0:
            return {"last": f"{length:.0f}"}
        until = (self.since + self.until + length) / 2 + by * length
        if until >= now:
            return {"last": f"{length:.0f}"}
        return {"from": f"{until - length:.0f}", "to": f"{until:.0f}"}

    def ticks(self, zone: tzinfo, limit: int = 7) -> list[Tick]:
        """Ticks at round times of day, at most `limit` + 1."""
        step = next(
            (s for s in STEPS_S if self.length / s <= limit), STEPS_S[-1] * (1 + int(self.length / 604800 / limit))
        )
        offset = datetime.fromtimestamp(self.since, UTC).astimezone(zone).utcoffset()
        shift = offset.total_seconds() if offset is not None else 0.0
        first = -(-(self.since + shift) // step) * step - shift
        found = []
        for number in range(limit + 1):
            at = first + number * step
            if at <= self.until:
                found.append(Tick(self.position(at), _label(at, zone, step)))
        return found


def _label(at: float, zone: tzinfo, step: float) -> str:
    local = datetime.fromtimestamp(at, UTC).astimezone(zone)
    if step >= 86400 or (local.hour, local.minute, local.second) == (0, 0, 0):
        return f"{local.day} {local:%b}"
    return f"{local:%H:%M:%S}" if step < 60 else f"{local:%H:%M}"


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) and 0.0 <= value < 1e11 else None
