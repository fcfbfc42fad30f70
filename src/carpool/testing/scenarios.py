"""Named fixed scenarios for policies: calm ones, and ones with failures, users and foreign processes."""

from __future__ import annotations

from collections.abc import Iterable

from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster
from carpool.sim.failures import FailureEvent
from carpool.sim.traces.trace import Arrival
from carpool.testing.driver import ForeignUse, UserAction
from carpool.testing.strategies import Scenario


def job(
    name: str,
    devices: int = 1,
    work: float = 10.0,
    *,
    at: float = 0.0,
    between: tuple[int, int] = (0, 0),
    kinds: Iterable[str] = (),
    after: Iterable[str] = (),
    weight: float = 1.0,
) -> Arrival:
    """One job and its submission time; `between` are its least and greatest device counts."""
    return Arrival(
        at,
        JobSpec(
            JobId(name),
            devices,
            work,
            weight=weight,
            min_devices=between[0],
            max_devices=between[1],
            kinds=tuple(map(Kind, kinds)),
            after=tuple(map(JobId, after)),
        ),
    )


CALM: dict[str, Scenario] = {
    "one job": Scenario(Cluster.build([(1, 1, "V100")]), [job("a")]),
    "one device, many jobs": Scenario(
        Cluster.build([(1, 1, "V100")]), [job(f"j{i}", work=float(1 + i % 3), at=i / 2) for i in range(8)]
    ),
    "all at once": Scenario(
        Cluster.build([(2, 4, "V100")]), [job(f"j{i}", 1 + i % 4, float(1 + i), weight=1.0 + i % 5) for i in range(10)]
    ),
    "a gang wider than a node": Scenario(
        Cluster.build([(3, 2, "V100")]), [job("a"), job("wide", 5, 4.0, at=1.0), job("b", 2, at=2.0), job("c", at=3.0)]
    ),
    "the whole cluster wanted behind small jobs": Scenario(
        Cluster.build([(1, 4, "V100")]),
        [job("first", 2, 5.0), job("all", 4, 5.0, at=1.0), *(job(f"s{i}", 1, 2.0, at=1.0 + i) for i in range(6))],
    ),
    "several device types": Scenario(
        Cluster.build([(2, 2, "V100"), (2, 4, "K80")]),
        [job("any", 2), job("v", 4, kinds=["V100"]), job("k", 8, kinds=["K80"]), job("both", 3, kinds=["K80", "V100"])],
    ),
    "elastic jobs": Scenario(
        Cluster.build([(1, 4, "V100")]),
        [job("a", 2, between=(1, 4)), job("b", 2, at=1.0, between=(1, 4)), job("c", 4, at=2.0, between=(2, 4))],
    ),
    "no length at all": Scenario(
        Cluster.build([(1, 2, "V100")]), [job("zero", work=0.0), job("a", 2), job("nil", 2, 0.0), job("b")]
    ),
    "one after another by action": Scenario(
        Cluster.build([(1, 2, "V100")]), [job("a"), job("b", after=["a"]), job("c", 2, after=["a", "b"]), job("d")]
    ),
}

TROUBLE: dict[str, Scenario] = {
    "a node is lost and comes back": Scenario(
        Cluster.build([(2, 2, "V100")]),
        [job("a", 2), job("b", 2), job("wide", 4, 5.0), job("late", 1, at=30.0)],
        [
            FailureEvent(3.0, "node-lost", "n0"),
            FailureEvent(8.0, "node-back", "n0"),
            FailureEvent(9.0, "node-lost", "n1"),
            FailureEvent(40.0, "node-back", "n1"),
        ],
    ),
    "every node is lost at once": Scenario(
        Cluster.build([(2, 1, "V100")]),
        [job("a"), job("b"), job("c", 2)],
        [
            FailureEvent(2.0, "node-lost", "n0"),
            FailureEvent(2.0, "node-lost", "n1"),
            FailureEvent(20.0, "node-back", "n0"),
            FailureEvent(25.0, "node-back", "n1"),
        ],
    ),
    "jobs crash": Scenario(
        Cluster.build([(1, 2, "V100")]),
        [job("a"), job("b", 2), job("c")],
        [FailureEvent(1.0, "job-crash", "a"), FailureEvent(2.0, "job-crash", "a"), FailureEvent(2.0, "job-crash", "c")],
    ),
    "others compute on devices for a while": Scenario(
        Cluster.build([(2, 2, "V100"), (1, 2, "K80")]),
        [
            job("a", between=(1, 4)),
            job("b", 2),
            *(job(f"s{i}", work=3.0, at=i / 2) for i in range(6)),
            job("late", at=9),
        ],
        visits=[ForeignUse(0.0, 12.0, 1), ForeignUse(2.0, 30.0, 2), ForeignUse(4.0, 8.0, 4), ForeignUse(5.0, 6.0, 0)],
    ),
    "others hold the only device first": Scenario(
        Cluster.build([(1, 1, "V100")]),
        [job("a"), job("b")],
        visits=[ForeignUse(0.0, 7.0, 0), ForeignUse(9.0, 11.0, 0)],
    ),
    "users change their minds": Scenario(
        Cluster.build([(1, 2, "V100")]),
        [job("a"), job("b"), job("c", 2), job("d"), job("e", after=["d"])],
        actions=[
            UserAction(1.0, "pause", "a"),
            UserAction(2.0, "cancel", "b"),
            UserAction(2.0, "pause", "c"),
            UserAction(4.0, "resume", "c"),
            UserAction(5.0, "resume", "a"),
            UserAction(6.0, "cancel", "d"),
        ],
    ),
}
