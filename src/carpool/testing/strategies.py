"""Hypothesis strategies for clusters, jobs, arrivals, failures and user requests; all are feasible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from carpool.core.host_resources import HostResources
from carpool.core.model import JobId, JobSpec, Kind, NodeId
from carpool.core.topology import Bank, Cluster, Node
from carpool.sim.failures import FailureEvent
from carpool.sim.traces.trace import Arrival
from carpool.testing.driver import ForeignUse, UserAction

_T = TypeVar("_T")

KINDS = ("V100", "P100", "K80")
GIB = 1 << 30

# Quarters of a second: sums of them are exact, so that a test can compare times with ==.
instants = st.integers(0, 160).map(lambda quarters: quarters / 4)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a simulated run starts from."""

    cluster: Cluster
    arrivals: Sequence[Arrival]
    mishaps: Sequence[FailureEvent] = ()
    actions: Sequence[UserAction] = ()
    visits: Sequence[ForeignUse] = ()


@st.composite
def clusters(draw: st.DrawFn, max_nodes: int = 4, max_size: int = 4, max_kinds: int = 3) -> Cluster:
    """Up to `max_kinds` device types, each with equal nodes."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=max_kinds, unique=True))
    groups = [(draw(st.integers(1, max_nodes)), draw(st.integers(1, max_size)), kind) for kind in kinds]
    return Cluster.build(groups)


@st.composite
def mixed_clusters(draw: st.DrawFn, max_nodes: int = 4) -> Cluster:
    """Nodes of any shape: several banks, of different types or memory."""
    nodes: list[Node] = []
    first = 0
    for index in range(draw(st.integers(1, max_nodes))):
        banks: list[Bank] = []
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 4))
            memory = draw(st.sampled_from((0, 8 * GIB, 16 * GIB)))
            banks.append(Bank(Kind(draw(st.sampled_from(KINDS))), range(first, first + size), memory))
            first += size
        nodes.append(Node(NodeId(index), f"n{index}", tuple(banks)))
    return Cluster(tuple(nodes))


@st.composite
def specs(draw: st.DrawFn, cluster: Cluster, name: str, *, elastic: bool = True, kinds: bool = True) -> JobSpec:
    """A job that the empty cluster can run."""
    kind = draw(st.sampled_from(cluster.kinds))
    devices = draw(st.integers(1, cluster.capacity[kind]))
    narrowest = widest = 0
    if elastic and draw(st.booleans()):
        narrowest = draw(st.integers(1, devices))
        widest = draw(st.integers(devices, cluster.num_devices))
    accepted: tuple[Kind, ...] = ()
    if kinds and draw(st.integers(0, 3)) == 0:
        accepted = (kind,)
    return JobSpec(
        JobId(name),
        devices,
        work=draw(st.integers(0, 80)) / 4,
        weight=float(draw(st.integers(1, 5))),
        user=draw(st.sampled_from(("", "ada", "bob"))),
        min_devices=narrowest,
        max_devices=widest,
        kinds=accepted,
    )


@st.composite
def arrivals(
    draw: st.DrawFn, cluster: Cluster, max_jobs: int = 8, *, elastic: bool = True, after: bool = True
) -> list[Arrival]:
    """Jobs in order of submission, many at one instant; some depend on an earlier one."""
    times = sorted(draw(st.lists(instants, min_size=1, max_size=max_jobs)))
    found: list[Arrival] = []
    for index, at in enumerate(times):
        spec = draw(specs(cluster, f"j{index}", elastic=elastic))
        if after and index and draw(st.integers(0, 5)) == 0:
            spec = replace(spec, after=(JobId(f"j{draw(st.integers(0, index - 1))}"),))
        found.append(Arrival(at, spec))
    return found


@st.composite
def mishaps(draw: st.DrawFn, cluster: Cluster, jobs: Sequence[JobId], max_mishaps: int = 4) -> list[FailureEvent]:
    """Crashes, and nodes that are lost and come back."""
    found: list[FailureEvent] = []
    for _ in range(draw(st.integers(0, max_mishaps))):
        at = draw(instants)
        if draw(st.booleans()):
            found.append(FailureEvent(at, "job-crash", draw(st.sampled_from(jobs))))
        else:
            node = draw(st.sampled_from(cluster.nodes)).name
            found += [
                FailureEvent(at, "node-lost", node),
                FailureEvent(at + draw(st.integers(1, 40)), "node-back", node),
            ]
    return found


@st.composite
def actions(draw: st.DrawFn, jobs: Sequence[JobId], max_wishes: int = 4) -> list[UserAction]:
    """Jobs that are cancelled, or paused and resumed later."""
    found: list[UserAction] = []
    for _ in range(draw(st.integers(0, max_wishes))):
        at, job = draw(instants), draw(st.sampled_from(jobs))
        if draw(st.integers(0, 2)) == 0:
            found.append(UserAction(at, "cancel", job))
        else:
            found += [UserAction(at, "pause", job), UserAction(at + draw(st.integers(0, 20)), "resume", job)]
    # Two pauses of one job may overlap; the last action is "resume", so that no job waits forever.
    found += [
        UserAction(100.0, "resume", job) for job in sorted({action.job for action in found if action.word == "pause"})
    ]
    return found


@st.composite
def random_scenarios(draw: st.DrawFn, max_jobs: int = 8, *, elastic: bool = True, trouble: bool = True) -> Scenario:
    """A cluster, jobs for it, and optionally failures and user actions."""
    cluster = draw(clusters())
    found = draw(arrivals(cluster, max_jobs, elastic=elastic))
    if not trouble:
        return Scenario(cluster, found)
    jobs = [arrival.spec.id for arrival in found]
    return Scenario(cluster, found, draw(mishaps(cluster, jobs)), draw(actions(jobs)))


@st.composite
def host_limited_scenarios(draw: st.DrawFn, max_jobs: int = 8) -> Scenario:
    """A run on nodes with few cores, little RAM and disk; every job fits on an empty node."""
    ground = draw(random_scenarios(max_jobs, trouble=False))
    size = min(len(node.devices) for node in ground.cluster.nodes)
    nodes = tuple(
        replace(
            node,
            resources=HostResources(draw(st.sampled_from((0, 4, 6))), draw(st.sampled_from((0, 4 * GIB))), 3 * GIB),
        )
        for node in ground.cluster.nodes
    )
    found: list[Arrival] = []
    for at, spec in ground.arrivals:
        width = min(spec.devices, size)
        asked = draw(st.sampled_from(((0, 0, 0), (4 // width, 0, 0), (1, GIB, GIB), (0, 4 * GIB // width, 2 * GIB))))
        narrow = replace(spec, devices=width, min_devices=min(spec.min_devices, width))
        found.append(Arrival(at, replace(narrow, cpus=asked[0], ram_bytes=asked[1], disk_bytes=asked[2])))
    return Scenario(Cluster(nodes), found)


def random_runs(
    strategy: st.SearchStrategy[_T], check: Callable[[_T], None], examples: int, *, shrinks: bool = True
) -> None:
    """Run a check on random values; contract methods cannot be decorated before their class is complete."""
    phases = set(Phase) if shrinks else {Phase.explicit, Phase.reuse, Phase.generate}
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    try_all = settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=quiet)
    try_all(given(strategy)(check))()
