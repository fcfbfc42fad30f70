"""What a job leaves on disk, read in pieces while it may still be written: its log and its curve."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from carpool.service.showing import Calendar
from carpool.service.views import LogPiece, MeasurementView


def read_log(path: Path, start: int, most: int, *, is_over: bool) -> LogPiece:
    """A stretch of a log; a negative start counts from its end. Characters are not torn apart while more may come."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + start) if start < 0 else min(start, size)
            file.seek(start)
            found = file.read(most)
    except FileNotFoundError:
        size, start, found = 0, 0, b""
    if not is_over or start + len(found) < size:
        found = whole_characters(found)
    end = start + len(found)
    return LogPiece(found.decode("utf-8", "replace"), start, end, is_over and end >= size)


def read_curve(path: Path, calendar: Calendar, most: int) -> list[MeasurementView]:
    """What a training has reported, thinned to so many points; the last is always there.

    Only lines that are shown are parsed. One that a crash has torn is left out.
    """
    try:
        with path.open("rb") as file:
            count = sum(line.endswith(b"\n") for line in file)  # the last may still be being written
            every = max(1, -(-count // most))
            file.seek(0)
            chosen = islice(file, (count - 1) % every, count, every) if count else ()
            return [found for line in chosen if (found := _measurement(line, calendar)) is not None]
    except FileNotFoundError:
        return []


def whole_characters(text: bytes) -> bytes:
    """A stretch of UTF-8 without the beginning of a character that is not all there."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # the first byte of several
            return text[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else text
        if byte < 0x80:
            return text
    return text


def _measurement(line: bytes, calendar: Calendar) -> MeasurementView | None:
    """One line of a curve; None where it is none."""
    try:
        row = json.loads(line)
        metrics = dict(row.get("metrics") or {})
        at, rate = calendar.unix(row["at_s"]), row.get("steps_per_s")
        return MeasurementView(at, row["step"], row.get("loss"), rate, metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
