"""Link survey: measures the links between the machines of a fleet in the background, as they join."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import combinations

from carpool.core.messages import LinkMeasured
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Path

_FEW = 8  # machines of which all pairs are measured
_AT_ONCE = 4  # measurements, of different machines

Pair = tuple[str, str]  # names of nodes
MeasurePair = Callable[[str, str], Awaitable[Path | None]]


def pairs_to_measure(nodes: Sequence[str]) -> list[Pair]:
    """The links of a fleet that are measured: all of a small one, else about three per machine.

    Between other machines the bandwidth is assumed from the fastest links of both (`Cluster.link_between`).
    """
    if len(nodes) <= _FEW:
        return list(combinations(nodes, 2))
    others = [dict.fromkeys((place - 1, place * 2 // 3, place // 2)) for place in range(1, len(nodes))]
    return [(nodes[other], nodes[place + 1]) for place, near in enumerate(others) for other in near]


class LinkSurvey:
    """Measures links that are not known yet, and again those of a machine that rejoined; one at a time per machine."""

    def __init__(
        self, scheduler: Scheduler, measure: MeasurePair, report: Callable[[LinkMeasured], Awaitable[None]]
    ) -> None:
        self._scheduler = scheduler
        self._measure = measure
        self._report = report
        self._tried: set[Pair] = set()
        self._has_joined = asyncio.Event()

    def joined(self, node: str) -> None:
        """A node joined or rejoined: its links are measured again."""
        self._tried = {pair for pair in self._tried if node not in pair}
        self._has_joined.set()

    async def run(self) -> None:
        """Measure the links that are due, now and whenever a node joins."""
        while True:
            self._has_joined.clear()
            while due := list(self._due()):
                await asyncio.gather(*[self._survey(pair) for pair in due])
            await self._has_joined.wait()

    def _due(self) -> Iterator[Pair]:
        """The next pairs that have not been tried, of different nodes."""
        cluster, lost = self._scheduler.cluster, self._scheduler.snapshot().occupancy.lost
        busy: set[str] = set()
        for pair in pairs_to_measure([node.name for node in cluster.nodes if node.id not in lost]):
            if pair not in self._tried and busy.isdisjoint(pair):
                busy.update(pair)
                yield pair
                if len(busy) >= 2 * _AT_ONCE:
                    return

    async def _survey(self, pair: Pair) -> None:
        self._tried.add(pair)
        found = await self._measure(*pair)
        if found is not None:
            await self._report(LinkMeasured(*pair, found.bytes_per_s, found.latency_s))
