"""Elastic on links that were learned: it keeps to one node where the network is slow, and spreads where it is fast."""

from __future__ import annotations

from itertools import product

import pytest

from carpool.core.messages import JobSubmitted, ProgressReported
from carpool.core.model import Allocation, Job, JobId, JobSpec, Phase
from carpool.core.topology import Cluster
from carpool.policies.market.policy import Elastic
from carpool.predictors.links.estimator import LinkEstimator
from carpool.predictors.move_cost import Move, MoveKind
from carpool.testing.rig import Rig

CLUSTER = Cluster.build([(2, 4, "V100")])
LONG = 1e5


def job(name: str) -> JobSpec:
    return JobSpec(JobId(name), 4, LONG, "m", 256, min_devices=1, max_devices=8)


def taught(network: float) -> LinkEstimator:
    """Everybody's steps over a bus of 10 GB/s and a network; the gradients are 200 MB."""
    estimator = LinkEstimator(CLUSTER)
    for width, apart in product((1, 2, 3, 4), (False, True)):
        if apart and width == 1:
            continue
        devices = [*range(width - 1), 4] if apart else [*range(width)]
        seconds = 0.02 + 0.64 / width + 2.0 * (width - 1) / width * 2e8 / (network if apart else 1e10)
        held = Allocation.of(*devices)
        teacher = Job(job("t"), 0, 0.0, Phase.RUNNING, held, 1, held, 1)
        estimator.learn(0.0, teacher, ProgressReported(JobId("t"), 1, 1.0, 1.0 / seconds, step_s=seconds))
    return estimator


@pytest.mark.parametrize(("network", "nodes"), [(2e8, 1), (5e10, 2)])
def test_spread_or_consolidated(network: float, nodes: int) -> None:
    rig = Rig(Elastic(), cluster=CLUSTER, estimator=taught(network))
    rig.say(0.0, JobSubmitted(job("a")))
    rig.answered(1.0)
    for at in (60.0, 120.0, 180.0):  # it may grow step by step
        held = rig.job("a").desired
        assert held is not None
        rig.say(at, rig.backend.progress("a", at))
        rig.answered(at + 1.0)
        wake = rig.wakes()
        if wake is not None:
            rig.say(wake)
            rig.answered(wake)
    held = rig.job("a").desired
    assert held is not None
    assert len(CLUSTER.groups_of(held)) == nodes, held


def test_the_price_of_a_move_is_the_policys_own_until_one_was_seen() -> None:
    estimator = LinkEstimator(CLUSTER)
    held = Allocation.of(0)
    jobs = [Job(job("a"), 0, 0.0, Phase.RUNNING, held, 1, held, 1)]
    policy, view = Elastic(move_s=7.0), Rig(Elastic(), estimator=estimator).scheduler.snapshot()
    assert policy._moves_s(view, jobs).tolist() == [7.0]
    estimator.moves.cost.update([Move(MoveKind.GROW, "m", 0.0, 1, 2, is_warm=True)] * 20, [0.5] * 20)
    assert policy._moves_s(view, jobs)[0] == pytest.approx(0.5, rel=0.3)
