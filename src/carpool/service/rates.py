"""How often somebody may ask: a bucket that fills steadily and from which every question takes one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Bucket:
    """Lets `burst` through at once and `per_s` in the long run."""

    per_s: float
    burst: float
    level: float
    at: float

    def take(self, at: float) -> float:
        """Take one if there is one; else the seconds until there is."""
        self.level = min(self.burst, self.level + max(0.0, at - self.at) * self.per_s)
        self.at = max(self.at, at)
        if self.level >= 1.0:
            self.level -= 1.0
            return 0.0
        return (1.0 - self.level) / self.per_s


class Buckets:
    """A bucket for everybody who asks; those who have not asked for longest are forgotten first."""

    def __init__(self, per_s: float, burst: float, most: int = 10_000) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, name: str, at: float) -> float:
        """Seconds that somebody has to wait; 0 where they need not."""
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(self._per_s, self._burst, self._burst, at)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        return bucket.take(at)
