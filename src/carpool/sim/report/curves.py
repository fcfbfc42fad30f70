"""Distributions of completion and waiting times, and completion times by job size, reduced for plotting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from carpool.core.metrics import nearest_rank
from carpool.sim.report.recording import Recording

TAIL = 64  # ranks at each end that are always drawn


@dataclass(frozen=True, slots=True)
class Distribution:
    """A cumulative distribution: `share` of all jobs have a value of at most `value`."""

    value: tuple[float, ...]
    share: tuple[float, ...]


def distribution(values: Iterable[float], num_jobs: int, limit: int) -> Distribution:
    """The distribution of some values among `num_jobs` jobs, drawn through about `limit` of them.

    Jobs without a value count in the share, so that a run which finished half of its jobs ends at one half.
    """
    ordered = sorted(values)
    num = len(ordered)
    ranks: Sequence[int] = range(num)
    if num > limit:
        even = (round(place * (num - 1) / (limit - 1)) for place in range(limit))
        ranks = sorted({*even, *range(TAIL), *range(num - TAIL, num)})
    return Distribution(tuple(ordered[rank] for rank in ranks), tuple((rank + 1) / num_jobs for rank in ranks))


def completion_times(recording: Recording) -> list[float]:
    """Completion time of every finished job: end − submit."""
    end_s, submit_s = recording.end_s, recording.submit_s
    return [end_s[job] - submit_s[job] for job in recording.finished()]


def waiting_times(recording: Recording) -> list[float]:
    """Waiting time of every finished job: completion time − time holding a device."""
    end_s, submit_s, held_s = recording.end_s, recording.submit_s, recording.held_s
    return [max(0.0, end_s[job] - submit_s[job] - held_s[job]) for job in recording.finished()]


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Completion times of the jobs that asked for between `low` and `high` devices; None where none finished."""

    low: int
    high: int
    num_jobs: int
    num_finished: int
    avg_s: float | None
    p50_s: float | None
    p99_s: float | None

    @property
    def label(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}–{self.high}"


def class_bounds(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The sizes themselves when they are few, else powers of two: 1, 2, 3–4, 5–8 and so on."""
    distinct = sorted(set(sizes))
    if len(distinct) <= 8:
        return tuple((size, size) for size in distinct)
    bounds: list[tuple[int, int]] = []
    high = 1
    while high < 2 * distinct[-1]:
        low = high // 2 + 1 if high > 1 else 0
        inside = [size for size in distinct if low <= size <= high]
        if inside:
            bounds.append((inside[0], inside[-1]))
        high *= 2
    return tuple(bounds)


def by_size(recording: Recording, bounds: Sequence[tuple[int, int]]) -> tuple[SizeClass, ...]:
    """Completion times of a run in each class of sizes."""
    place = {size: index for index, (low, high) in enumerate(bounds) for size in range(low, high + 1)}
    times: list[list[float]] = [[] for _ in bounds]
    counts = [0] * len(bounds)
    for size in recording.devices:
        counts[place[size]] += 1
    for job in recording.finished():
        times[place[recording.devices[job]]].append(recording.end_s[job] - recording.submit_s[job])
    return tuple(
        _size_class(low, high, count, sorted(values))
        for (low, high), count, values in zip(bounds, counts, times, strict=True)
    )


def _size_class(low: int, high: int, num_jobs: int, ordered: Sequence[float]) -> SizeClass:
    if not ordered:
        return SizeClass(low, high, num_jobs, 0, None, None, None)
    avg = math.fsum(ordered) / len(ordered)
    return SizeClass(low, high, num_jobs, len(ordered), avg, nearest_rank(ordered, 0.5), nearest_rank(ordered, 0.99))
