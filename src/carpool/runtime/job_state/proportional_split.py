"""Proportional split of a step's pieces over devices by measured speed; pure.

A piece is a sample (default mode) or a logical shard (exact mode). Devices of one kind and share count as equally
fast, so that like devices always get like parts and two runs on them learn the same bits; unlike ones are measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from carpool.runtime.reduce.shards import maximal_subtrees

WORTH = 0.05  # of a step's time must be gained by dealing anew
SETTLED = 8  # passes measured on every kind before anything is dealt anew; the last ones are remembered

DeviceShare = tuple[str, float]  # kind of device and fraction of it


@dataclass(slots=True)
class DeviceSpeeds:
    """Samples per second of each kind of device: guessed from its cores, then measured.

    A speed is the median of the last passes: the first pass of a new cut builds what later ones reuse and takes several
    times as long, and so does one that was disturbed; a mean would have such a pass dealt for.
    """

    guessed: dict[DeviceShare, float] = field(default_factory=dict)
    measured: dict[DeviceShare, deque[float]] = field(default_factory=dict)  # seconds per sample of the last passes
    passes: dict[DeviceShare, int] = field(default_factory=dict)  # since the cut last changed

    def guess(self, trait: DeviceShare, speed: float) -> None:
        """Believe this until it is measured."""
        self.guessed.setdefault(trait, max(speed, 1e-9))

    def measure(self, trait: DeviceShare, seconds: float, samples: int) -> None:
        """Take in one pass."""
        if samples <= 0 or seconds <= 0.0:
            return
        self.measured.setdefault(trait, deque(maxlen=SETTLED)).append(seconds / samples)
        self.passes[trait] = self.passes.get(trait, 0) + 1

    def of(self, trait: DeviceShare) -> float:
        """Samples per second, or a guess in proportion to what was measured on others."""
        if trait in self.measured:
            return self._median(trait)
        ratios = [self._median(known) / self.guessed[known] for known in self.measured if known in self.guessed]
        return self.guessed.get(trait, 1.0) * (sum(ratios) / len(ratios) if ratios else 1.0)

    def _median(self, trait: DeviceShare) -> float:
        return 1.0 / statistics.median(self.measured[trait])

    def are_settled(self, traits: Sequence[DeviceShare], times: int = 1) -> bool:
        """Whether every one has been measured so many times often enough since the last change."""
        return all(self.passes.get(trait, 0) >= times * SETTLED for trait in traits)


def split_proportionally(pieces: int, speeds: Sequence[float], least: int = 0) -> tuple[int, ...]:
    """So many pieces for each device that the slowest is done as early as possible; ties go to the first.

    Each gets at least ``least`` where there are enough.
    """
    hands = len(speeds)
    floor = least if pieces >= least * hands else 0
    total = sum(speeds)
    counts = [max(floor, int(pieces * speed / total) - 1) for speed in speeds]
    while sum(counts) > pieces:  # the floors took too much: from whoever has the most time to spare over its floor
        rank = max((r for r in range(hands) if counts[r] > floor), key=lambda r: (counts[r] / speeds[r], r))
        counts[rank] -= 1
    while sum(counts) < pieces:
        rank = min(range(hands), key=lambda r: ((counts[r] + 1) / speeds[r], r))
        counts[rank] += 1
    return tuple(counts)


def is_worth_it(now: Sequence[int], then: Sequence[int], speeds: Sequence[float]) -> bool:
    """Whether dealing anew shortens the pass of the slowest device by enough."""
    before = max(count / speed for count, speed in zip(now, speeds, strict=True))
    after = max(count / speed for count, speed in zip(then, speeds, strict=True))
    return before > (1.0 + WORTH) * after


def as_owners(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Contiguous ranges of pieces, in the order of the ranks."""
    return tuple(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def segment_bytes(owners: Sequence[tuple[int, int]], slot_bytes: int) -> int:
    """Two buffers, so that one barrier a step is enough, of one slot per maximal subtree of every rank."""
    slots = sum(len(maximal_subtrees(range(*owned))) for owned in owners)
    return 2 * slots * slot_bytes
