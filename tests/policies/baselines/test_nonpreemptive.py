"""Hare's order with all speeds averaged: kinds are not looked at."""

from carpool.core.messages import Assign
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import SchedHomo
from carpool.testing import Driven, check_state, drive
from carpool.testing.scenarios import job
from tests.support.scaling_world import ScalingWorld

UNLIKE = Cluster.build([(1, 2, "K80"), (1, 2, "V100")])
WORLD = ScalingWorld(speeds={"V100": 3.0, "K80": 1.0})


def moves(run: Driven) -> list[tuple[float, str, list[int]]]:
    return [(at, order.job, list(order.allocation.devices())) for at, order in run.orders if isinstance(order, Assign)]


def test_shortest_per_weight_first_on_the_lowest_devices() -> None:
    arrivals = [job("a", 1, 8.0), job("b", 1, 9.0, weight=3.0), job("c", 2, 20.0)]
    assert moves(drive(SchedHomo(), UNLIKE, arrivals, WORLD)) == [
        (0.0, "b", [0]),  # 9 / 2 / 3, on the slow kind although the fast one is free
        (0.0, "a", [1]),
        (0.0, "c", [2, 3]),
    ]


def test_does_not_preempt() -> None:
    arrivals = [job("a", 2, 90.0), job("b", 2, 90.0), job("short", 1, 1.0, at=1.0)]
    assert drive(SchedHomo(), UNLIKE, arrivals, WORLD).summary.preemptions == 0


def test_a_mixed_gang_goes_at_the_pace_of_its_slowest() -> None:
    arrivals = [job("a", 1, 100.0, kinds=["K80"]), job("gang", 3, 10.0)]
    assert drive(SchedHomo(), UNLIKE, arrivals, WORLD).summary.finished == 1  # three of one kind there are not
    run = drive(SchedHomo(mixed=True), UNLIKE, arrivals, WORLD, check=check_state)
    assert moves(run) == [(0.0, "gang", [0, 1, 2]), (10.0, "a", [0])]


def test_head_blocks_only_if_told_to() -> None:
    arrivals = [job("a", 1, 50.0, kinds=["K80"]), job("b", 2, 2.0, kinds=["K80"], at=1.0), job("c", 1, 60.0, at=1.0)]
    assert moves(drive(SchedHomo(), UNLIKE, arrivals, WORLD))[1] == (1.0, "c", [1])
    assert moves(drive(SchedHomo(bypass=False), UNLIKE, arrivals, WORLD))[1] == (50.0, "b", [0, 1])
