"""Which cores feed which GPU worker: those that ask for some are kept apart as far as there are enough."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence


class Cores:
    """Cores of this machine, given out to processes that asked for a number of them."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        self._given: dict[Hashable, tuple[int, ...]] = {}

    def claim(self, who: Hashable, count: int) -> tuple[int, ...]:
        """As many cores, those with the fewest claims first; none where none were asked for: then all may be used."""
        self.let_go(who)
        if not count:
            return ()
        claims = [core for given in self._given.values() for core in given]
        chosen = sorted(self._cores, key=lambda core: (claims.count(core), core))[:count]
        self._given[who] = tuple(sorted(chosen))
        return self._given[who]

    def let_go(self, who: Hashable) -> None:
        """Somebody is gone, or never had any."""
        self._given.pop(who, None)
