"""Computes gaps between the steps of time-sliced jobs from their stamps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WARM = 12  # first steps of a job: made by the code, recorded and proved
Steps = Sequence[tuple[int, int]]  # (begin, end) in nanoseconds


def gaps_ms(steps_of: Mapping[str, Steps], warm: int = WARM) -> dict[str, list[float]]:
    """For each job, the gaps before those of its steps that follow another job's, once both are warm.

    Not after a job's last step: in it the job writes its stamps, before it lets the device go.
    """
    line = _line(steps_of)
    found: dict[str, list[float]] = {job: [] for job in steps_of}
    for (_, left, before, earlier), (begin, _, job, number) in itertools.pairwise(line):
        is_last = earlier == len(steps_of[before]) - 1
        if before != job and min(earlier, number) >= warm and not is_last:
            found[job].append((begin - left) / 1e6)
    return found


def steps_ms(steps_of: Mapping[str, Steps], warm: int = WARM) -> dict[str, dict[str, float]]:
    """For each job, the median time of its warm steps: of all, and of those after which it hands the device on.

    While the latter run, the next job's work stands queued behind the baton: both should take the same time.
    """
    line = _line(steps_of)
    took: dict[str, list[float]] = {job: [] for job in steps_of}
    last: dict[str, list[float]] = {job: [] for job in steps_of}
    for (begin, end, job, number), after in itertools.zip_longest(line, line[1:]):
        if number >= warm:
            took[job].append((end - begin) / 1e6)
            if after is not None and after[2] != job:
                last[job].append((end - begin) / 1e6)
    return {job: {"all": _median(took[job]), "before_a_switch": _median(last[job])} for job in steps_of if took[job]}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How many, the median, the 99th percentile (the smallest value that 99 % do not exceed) and the largest."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    rank = -(-99 * len(ordered) // 100)
    return {
        "count": len(ordered),
        "median": _median(ordered),
        "p99": round(ordered[rank - 1], 4),
        "max": round(ordered[-1], 4),
    }


def _line(steps_of: Mapping[str, Steps]) -> list[tuple[int, int, str, int]]:
    """All steps in the order in which they began: begin, end, job, number."""
    return sorted(
        (begin, end, job, number) for job, steps in steps_of.items() for number, (begin, end) in enumerate(steps)
    )


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4) if values else 0.0
