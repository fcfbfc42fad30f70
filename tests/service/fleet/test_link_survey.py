"""The survey of links: each pair once, few of a large fleet, again after a return, and failures stop nothing."""

from __future__ import annotations

import asyncio
from collections import Counter

from carpool.core.messages import LinkMeasured, NodeLost
from carpool.core.model import NodeId
from carpool.core.scheduler import Scheduler
from carpool.core.topology import Cluster, Path
from carpool.policies.baselines.nonpreemptive import Fifo
from carpool.service.fleet.link_survey import LinkSurvey, pairs_to_measure


def test_all_pairs_of_a_small_fleet_and_few_of_a_large_one() -> None:
    assert pairs_to_measure(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    names = [f"n{number}" for number in range(1000)]
    pairs = pairs_to_measure(names)
    assert len(pairs) < 3 * len(names)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs), "no pair twice"
    counts = Counter(name for pair in pairs for name in pair)
    assert set(counts) == set(names)
    assert max(counts.values()) <= 8, "no machine is measured with many others"


class Rig:
    """A survey over four nodes with links of given speeds; a link to n3 cannot be measured."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Cluster.build([(4, 1, "V100")]), Fifo())
        self.measured: list[tuple[str, str]] = []
        self.busy: Counter[str] = Counter()
        self.is_idle = asyncio.Event()
        self.survey = LinkSurvey(self.scheduler, self.measure, self.report)

    async def measure(self, one: str, other: str) -> Path | None:
        self.measured.append((one, other))
        for name in (one, other):
            self.busy[name] += 1
            assert self.busy[name] == 1, "two measurements would disturb each other"
        await asyncio.sleep(0)
        for name in (one, other):
            self.busy[name] -= 1
        return None if other == "n3" else Path(1e9, 1e-4)

    async def report(self, fact: LinkMeasured) -> None:
        self.scheduler.handle(0.0, [fact])


async def settled(rig: Rig, count: int) -> None:
    async with asyncio.timeout(60.0):
        while len(rig.measured) < count or rig.busy.total():  # noqa: ASYNC110 - turns of the event loop, no time
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)


def test_each_link_is_measured_once_and_again_after_a_return() -> None:
    async def main() -> None:
        rig = Rig()
        running = asyncio.create_task(rig.survey.run())
        await settled(rig, 6)
        assert len(rig.measured) == 6
        assert {link.ends for link in rig.scheduler.cluster.links} == {("n0", "n1"), ("n0", "n2"), ("n1", "n2")}
        rig.survey.joined("n1")
        await settled(rig, 9)
        assert sorted(rig.measured[6:]) == [("n0", "n1"), ("n1", "n2"), ("n1", "n3")]
        running.cancel()

    asyncio.run(main())


def test_a_lost_node_is_not_measured() -> None:
    async def main() -> None:
        rig = Rig()
        rig.scheduler.handle(0.0, [NodeLost(NodeId(1))])
        running = asyncio.create_task(rig.survey.run())
        await settled(rig, 3)
        assert all("n1" not in pair for pair in rig.measured)
        running.cancel()

    asyncio.run(main())
