"""Proportional split of a step's pieces over devices by measured speed; pure.

A piece is a sample (default mode) or a logical shard (exact mode). Equal shares of one device type count as equally
fast, so that homogeneous devices always get equal parts and two runs on them learn the same bits.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from carpool.runtime.reduce.shards import maximal_subtrees

MIN_GAIN = 0.05  # of the slowest pass, for a new split
MIN_PASSES = 8  # passes measured on every device type before a new split; this many are kept

DeviceShare = tuple[str, float]  # device type and fraction


@dataclass(slots=True)
class DeviceSpeeds:
    """Samples per second of each device share: guessed from its cores, then the median of the last passes.

    A median, because the first pass of a new split and disturbed ones take several times as long.
    """

    guessed: dict[DeviceShare, float] = field(default_factory=dict)
    measured: dict[DeviceShare, deque[float]] = field(default_factory=dict)  # seconds per sample of the last passes
    passes: dict[DeviceShare, int] = field(default_factory=dict)  # since the split last changed

    def guess(self, share: DeviceShare, speed: float) -> None:
        self.guessed.setdefault(share, max(speed, 1e-9))

    def measure(self, share: DeviceShare, seconds: float, samples: int) -> None:
        if samples <= 0 or seconds <= 0.0:
            return
        self.measured.setdefault(share, deque(maxlen=MIN_PASSES)).append(seconds / samples)
        self.passes[share] = self.passes.get(share, 0) + 1

    def of(self, share: DeviceShare) -> float:
        """Samples per second; a guess is scaled by what was measured on other shares."""
        if share in self.measured:
            return self._median(share)
        ratios = [self._median(known) / self.guessed[known] for known in self.measured if known in self.guessed]
        return self.guessed.get(share, 1.0) * (sum(ratios) / len(ratios) if ratios else 1.0)

    def _median(self, share: DeviceShare) -> float:
        return 1.0 / statistics.median(self.measured[share])

    def are_settled(self, shares: Sequence[DeviceShare], times: int = 1) -> bool:
        """Whether each has been measured in ``times`` times the passes needed since the last change."""
        return all(self.passes.get(share, 0) >= times * MIN_PASSES for share in shares)


def split_proportionally(pieces: int, speeds: Sequence[float], least: int = 0) -> tuple[int, ...]:
    """How many pieces each device gets, so that the last one is done as early as possible; ties go to the first.

    Each gets at least ``least``, if there are enough pieces for that.
    """
    ranks = len(speeds)
    floor = least if pieces >= least * ranks else 0
    total = sum(speeds)
    counts = [max(floor, int(pieces * speed / total) - 1) for speed in speeds]
    while sum(counts) > pieces:  # the minimums sum to too much: take from the slowest above its minimum
        rank = max((r for r in range(ranks) if counts[r] > floor), key=lambda r: (counts[r] / speeds[r], r))
        counts[rank] -= 1
    while sum(counts) < pieces:
        rank = min(range(ranks), key=lambda r: ((counts[r] + 1) / speeds[r], r))
        counts[rank] += 1
    return tuple(counts)


def slowest_pass_s(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Duration of the slowest device's pass."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def is_worth_it(now: Sequence[int], then: Sequence[int], speeds: Sequence[float]) -> bool:
    """Whether a new split shortens the slowest pass by enough."""
    return slowest_pass_s(now, speeds) > (1.0 + MIN_GAIN) * slowest_pass_s(then, speeds)


def as_owners(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Contiguous ranges of pieces, by rank."""
    return tuple(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def segment_bytes(owners: Sequence[tuple[int, int]], contribution_bytes: int) -> int:
    """Size of two buffers (so that one barrier per step is enough) with one slot per maximal subtree of every rank."""
    slots = sum(len(maximal_subtrees(range(*owned))) for owned in owners)
    return 2 * slots * contribution_bytes
