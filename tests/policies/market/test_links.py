"""Jobs across nodes with measured links: they take the fast link, and leave a slow one unless it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carpool.backends.online_estimator import OnlineEstimator
from carpool.core.messages import JobSubmitted, LinkMeasured, ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.policy import Policy
from carpool.core.topology import Cluster
from carpool.policies.market.policy import Carpool, Elastic
from carpool.runtime.executor.reports import Sized
from carpool.testing.rig import Rig

NODES = replace(Cluster.build([(4, 1, "V100")]), max_nodes=1)
MEGABYTE = 1e6
COMPUTE_S = 1.0  # of a step on one device; half on two
GRADIENT_BYTES = 100 * MEGABYTE


def spec(name: str, width: int = 2) -> JobSpec:
    return JobSpec(JobId(name), min_devices=1, max_devices=width, work=1e5, max_nodes=2)


def fleet(policy: Policy, speeds: dict[tuple[int, int], float]) -> Rig:
    """A rig with measured links; jobs a and b have run on one device before."""
    estimator = OnlineEstimator(NODES)
    rig = Rig(policy, cluster=NODES, estimator=estimator)
    rig.say(0.0, *[LinkMeasured(f"n{one}", f"n{other}", speed, 0.0) for (one, other), speed in speeds.items()])
    estimator.cluster = rig.scheduler.cluster
    held = Allocation.of(0)
    for name in ("a", "b"):
        estimator.take(Sized(JobId(name), 100_000, 64, gradient_bytes=int(GRADIENT_BYTES)))
        earlier = Job(spec(name), 0, 0.0, Phase.RUNNING, held, 1, held, 1)
        estimator.learn(0.0, earlier, ProgressReported(JobId(name), 1, 1.0, 1.0 / COMPUTE_S, step_s=COMPUTE_S))
    return rig


def nodes_of(rig: Rig, name: str) -> set[int]:
    held = rig.job(name).desired
    assert held is not None
    return rig.scheduler.cluster.nodes_of(held)


SLOW_AND_FAST = {(0, 1): 10 * MEGABYTE, (0, 2): 10 * MEGABYTE, (0, 3): 10 * MEGABYTE} | {
    (1, 2): 10 * MEGABYTE,
    (1, 3): 10 * MEGABYTE,
    (2, 3): 10_000 * MEGABYTE,
}


@pytest.mark.parametrize("policy", [Carpool(), Elastic()])
def test_a_job_widens_over_the_fast_link(policy: Policy) -> None:
    rig = fleet(policy, SLOW_AND_FAST)
    rig.say(1.0, JobSubmitted(spec("a")))
    assert nodes_of(rig, "a") == {2, 3}


@pytest.mark.parametrize("policy", [Carpool(), Elastic()])
def test_a_job_keeps_to_one_node_where_all_links_are_slow(policy: Policy) -> None:
    rig = fleet(policy, dict.fromkeys(SLOW_AND_FAST, 10 * MEGABYTE))  # 10 s of synchronisation
    rig.say(1.0, JobSubmitted(spec("a")))
    assert len(nodes_of(rig, "a")) == 1


@pytest.mark.parametrize("policy", [Carpool(), Elastic()])
def test_the_second_job_does_not_take_what_is_left_of_the_links(policy: Policy) -> None:
    rig = fleet(policy, SLOW_AND_FAST)
    rig.say(1.0, JobSubmitted(spec("a")), JobSubmitted(spec("b")))
    assert sorted(len(nodes_of(rig, name)) for name in ("a", "b")) == [1, 2]
    assert {2, 3} in [nodes_of(rig, name) for name in ("a", "b")]


def test_a_job_that_needs_two_nodes_takes_them_over_any_link() -> None:
    rig = fleet(Carpool(), dict.fromkeys(SLOW_AND_FAST, 10 * MEGABYTE))
    wide = JobSpec(JobId("a"), 2, work=1e5, max_nodes=2)
    rig.say(1.0, JobSubmitted(wide))
    assert len(nodes_of(rig, "a")) == 2


def test_a_rigid_job_over_two_nodes_takes_the_fast_link() -> None:
    rig = fleet(Carpool(), SLOW_AND_FAST)
    rig.say(1.0, JobSubmitted(JobSpec(JobId("a"), 2, work=1e5, max_nodes=2)))
    assert nodes_of(rig, "a") == {2, 3}
