"""Shortest (remaining) job first: order, preemption, and brute force on one device."""

from collections.abc import Sequence
from functools import cache
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.messages import Assign, JobFinished, JobSubmitted, Release
from carpool.core.model import Allocation, JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.topology import Cluster
from carpool.policies.baselines.nonpreemptive import Sjf
from carpool.policies.baselines.srtf import Srtf, Wsrtf
from carpool.sim.worlds.base import PlainWorld
from carpool.testing import Driven, Rig, check_state, drive
from carpool.testing.scenarios import job
from tests.support.scaling_world import ScalingWorld

ONE = Cluster.build([(1, 1, "V100")])
UNLIKE = Cluster.build([(1, 1, "K80"), (1, 1, "V100")])
SPEEDS = ScalingWorld(speeds={"V100": 4.0, "K80": 1.0})


def submitted(name: str, devices: int = 1, work: float = 10.0) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), devices, work))


def moves(run: Driven) -> list[tuple[float, str, list[int]]]:
    """(instant, job, devices) of every order."""
    return [
        (at, order.job, list(order.allocation.devices()) if isinstance(order, Assign) else [])
        for at, order in run.orders
    ]


# ------------------------------------------------------------------------------------------------------------- sjf
def test_sjf_starts_the_shortest_and_lets_it_end() -> None:
    arrivals = [
        job("long", work=9.0),
        job("a", work=5.0, at=1.0),
        job("b", work=2.0, at=2.0),
        job("c", work=1.0, at=10.0),
    ]
    assert moves(drive(Sjf(), ONE, arrivals)) == [
        (0.0, "long", [0]),
        (9.0, "b", [0]),
        (11.0, "c", [0]),
        (12.0, "a", [0]),
    ]


def test_sjf_blocks_at_its_head_unless_bypassed() -> None:
    arrivals = [job("first", 1, 4.0), job("wide", 2, 1.0, at=1.0), job("long", 1, 9.0, at=1.0)]
    two = Cluster.build([(1, 2, "V100")])
    assert moves(drive(Sjf(), two, arrivals))[1] == (4.0, "wide", [0, 1])
    assert moves(drive(Sjf(bypass=True), two, arrivals))[1] == (1.0, "long", [1])


def test_sjf_counts_seconds_on_the_fastest_kind_and_takes_it_first() -> None:
    assert moves(drive(Sjf(), UNLIKE, [job("a", work=8.0), job("b", work=6.0)], SPEEDS)) == [
        (0.0, "b", [1]),
        (0.0, "a", [0]),
    ]


# ------------------------------------------------------------------------------------------------------------ srtf
def test_srtf_takes_the_device_from_the_longest() -> None:
    rig = Rig(Srtf(), [(1, 2, "V100")])
    rig.say(0.0, submitted("a", work=50.0), submitted("b", work=20.0))
    rig.answered(0.0)
    assert rig.say(5.0, submitted("c", work=30.0)) == [
        Release(JobId("a"), 2),
        Assign(JobId("c"), Allocation.of(1), 1),
    ]


def test_srtf_leaves_a_running_job_that_is_as_short() -> None:
    rig = Rig(Srtf(), [(1, 1, "V100")])
    rig.say(0.0, submitted("a", work=50.0))
    rig.answered(0.0)
    assert rig.say(10.0, submitted("b", work=40.0)) == []
    assert rig.say(10.0, submitted("c", work=39.0)) != []


def test_srtf_clears_the_node_that_costs_least() -> None:
    rig = Rig(Srtf(), [(2, 2, "V100")])
    for at, (name, work) in enumerate([("a", 90.0), ("b", 20.0), ("c", 80.0), ("d", 70.0)]):
        rig.say(float(at), submitted(name, work=work))
        rig.answered(float(at))
    # the longest is on node 0, but beside it runs one that is shorter than the newcomer
    assert rig.say(4.0, submitted("wide", 2, 60.0)) == [
        Release(JobId("c"), 2),
        Release(JobId("d"), 2),
        Assign(JobId("wide"), Allocation.of(2, 3), 1),
    ]


def test_srtf_gives_back_what_was_not_needed_and_fills_up() -> None:
    rig = Rig(Srtf(), [(1, 8, "V100")])
    rig.say(0.0, submitted("wide", 6, 50.0), submitted("x", 1, 60.0), submitted("y", 1, 70.0))
    rig.answered(0.0)
    # by count y, x and wide would have to go; with wide gone there is room for x and y again, and for one that waits
    orders = rig.say(1.0, submitted("new", 3, 10.0), submitted("late", 2, 95.0))
    assert orders == [
        Release(JobId("wide"), 2),
        Assign(JobId("new"), Allocation.of(0, 1, 2), 1),
        Assign(JobId("late"), Allocation.of(3, 4), 1),
    ]


def test_srtf_passes_over_a_gang_that_does_not_fit() -> None:
    rig = Rig(Srtf(), [(1, 2, "V100")])
    rig.say(0.0, submitted("a", 1, 5.0))
    rig.answered(0.0)
    assert rig.say(1.0, submitted("wide", 2, 8.0), submitted("b", 1, 29.0)) == [Assign(JobId("b"), Allocation.of(1), 1)]
    rig.answered(1.0)
    assert rig.say(5.0, JobFinished(JobId("a"), 1)) == [
        Release(JobId("b"), 2),
        Assign(JobId("wide"), Allocation.of(0, 1), 1),
    ]


def test_unlike_kinds_go_to_the_shortest_and_jobs_move_up() -> None:
    arrivals = [job("short", work=4.0), job("long", work=12.0)]
    assert moves(drive(Srtf(), UNLIKE, arrivals, SPEEDS)) == [
        (0.0, "short", [1]),
        (0.0, "long", [0]),
        (1.0, "long", [1]),
    ]
    assert moves(drive(Srtf(stay=5.0), UNLIKE, arrivals, SPEEDS)) == [(0.0, "short", [1]), (0.0, "long", [0])]


# ---------------------------------------------------------------------------------------------------- brute force
Batch = Sequence[tuple[int, int]]  # (release, length) of each job


def least_total(jobs: Batch) -> int:
    """Least sum of completion times on one device with preemption, trying every job at every second."""

    @cache
    def least(at: int, left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        ready = [i for i, rest in enumerate(left) if rest and jobs[i][0] <= at]
        if not ready:
            return least(at + 1, left)
        options = []
        for i in ready:
            rest = (*left[:i], left[i] - 1, *left[i + 1 :])
            options.append((at + 1 if not rest[i] else 0) + least(at + 1, rest))
        return min(options)

    return least(0, tuple(length for _, length in jobs))


batches = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=4)


def total(policy: Policy, jobs: Batch, world: PlainWorld | ScalingWorld | None = None) -> float:
    arrivals = [job(f"j{i}", work=float(length), at=float(at)) for i, (at, length) in enumerate(sorted(jobs))]
    run = drive(policy, ONE, arrivals, world, check=check_state)
    return run.summary.avg_jct_s * len(jobs) + sum(at for at, _ in jobs)


@given(batches)
def test_srtf_is_optimal_on_one_device(jobs: Batch) -> None:
    best = least_total(jobs)
    assert abs(total(Srtf(), jobs) - best) < 1e-6
    assert abs(total(Srtf(), jobs, ScalingWorld()) - best) < 1e-6  # ranked at every plan instead of kept in order


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_wsrtf_is_optimal_for_a_batch_on_one_device(jobs: Batch) -> None:
    best = min(
        sum(weight * sum(length for length, _ in order[: i + 1]) for i, (_, weight) in enumerate(order))
        for order in permutations(jobs)
    )
    arrivals = [job(f"j{i}", work=float(length), weight=float(weight)) for i, (length, weight) in enumerate(jobs)]
    summary = drive(Wsrtf(), ONE, arrivals, check=check_state).summary
    assert abs(summary.weighted_jct_s * sum(weight for _, weight in jobs) - best) < 1e-6
