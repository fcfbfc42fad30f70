"""Steps of a fixed number of parts: waves, unlike kinds, gaps, switches, and what nobody can beat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import InputError, UnknownName
from carpool.core.estimates import Estimator
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Neighbour, Placement
from carpool.policies.registry import parse_policy
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.parts import KINDS, PartsWorld, dealt
from carpool.testing import EstimatorContract

V100, K80 = Kind("V100"), Kind("K80")
WORLD = PartsWorld({"net": {"V100": 0.1, "K80": 0.3}})
FOUR = JobSpec(JobId("a"), 4, 10.0, model="net")


def on(*groups: tuple[Kind, int], **more: object) -> Placement:
    return Placement(groups, **more)  # type: ignore[arg-type]


def test_work_is_seconds_on_one_fast_device_for_each_part() -> None:
    assert WORLD.rate(FOUR, on((V100, 4))) == pytest.approx(1.0)
    assert WORLD.rate(FOUR, on((K80, 4))) == pytest.approx(1 / 3)


def test_fewer_devices_than_parts_work_in_waves() -> None:
    assert WORLD.rate(FOUR, on((V100, 2))) == pytest.approx(1 / 2)
    assert WORLD.rate(FOUR, on((V100, 3))) == pytest.approx(1 / 2)  # the second wave has one part
    assert WORLD.rate(FOUR, on((V100, 1))) == pytest.approx(1 / 4)


def test_a_fast_device_takes_more_parts_than_a_slow_one() -> None:
    step = WORLD.step(FOUR, ((K80, 1), (V100, 1)))
    assert step.seconds == pytest.approx(0.3)  # three parts on the V100, one on the K80
    assert step.idle == pytest.approx({V100: 0.0, K80: 0.0})


def test_a_slow_device_beside_fast_ones_makes_them_wait() -> None:
    step = WORLD.step(FOUR, ((K80, 1), (V100, 3)))  # two on one V100 end before one on the K80 would
    assert step.seconds == pytest.approx(0.2)
    assert step.idle == pytest.approx({V100: 1 / 3, K80: 1.0})


@given(
    st.lists(st.tuples(st.sampled_from(["V100", "P100", "K80"]), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_other_deal_of_the_parts_makes_a_shorter_step(groups: list[tuple[str, int]], parts: int) -> None:
    part_s = {"V100": 1.0, "P100": 1.6, "K80": 3.7}
    shape = tuple((Kind(kind), count) for kind, count in groups)
    found = dealt(part_s, parts, shape)
    ends = sorted({n * seconds for seconds in part_s.values() for n in range(1, parts + 1)})
    possible = [end for end in ends if sum(count * int((end + 1e-9) / part_s[kind]) for kind, count in shape) >= parts]
    assert found.seconds == pytest.approx(min(possible))
    busy = sum(
        (1.0 - found.idle[Kind(kind)]) * found.seconds * sum(n for k, n in shape if k == kind) / part_s[kind]
        for kind in {kind for kind, _ in shape}
    )
    assert busy == pytest.approx(parts)  # every part is done once


def test_a_later_turn_runs_in_the_gaps_and_slows_nobody() -> None:
    leader = Neighbour(FOUR, groups=((K80, 1), (V100, 3)))
    one = JobSpec(JobId("b"), 1, 5.0, model="net")
    rate = WORLD.rate(one, on((V100, 1), turn=1, neighbours=(leader,)))
    assert rate == pytest.approx(1 / 3 - 2 * 0.004 / 0.2)
    behind = Neighbour(one, turn=1, groups=((V100, 1),))
    alone = on((K80, 1), (V100, 3))
    assert WORLD.rate(FOUR, Placement(alone.groups, neighbours=(behind,))) == WORLD.rate(FOUR, alone)


def test_no_gaps_no_progress() -> None:
    one = JobSpec(JobId("b"), 1, 5.0, model="net")
    busy = Neighbour(FOUR, groups=((V100, 4),))
    assert WORLD.rate(one, on((V100, 1), turn=1, neighbours=(busy,))) == 0.0
    assert WORLD.rate(one, on((V100, 1), turn=1, neighbours=(Neighbour(FOUR),))) == 0.0


def test_equal_turns_share_by_fraction() -> None:
    assert WORLD.rate(FOUR, on((V100, 4), fraction=0.5, neighbours=(Neighbour(FOUR, 0.5),))) == pytest.approx(0.5)
    assert WORLD.rate(FOUR, on((V100, 4), neighbours=(Neighbour(FOUR),))) == pytest.approx(0.5)


def test_a_switch_is_paid_where_devices_change() -> None:
    spec = JobSpec(JobId("a"), 2, 10.0, model="bert")
    here = on((V100, 2))
    cold = PartsWorld.generate(0, "cold")
    assert cold.change_s(spec, None, here) == cold.change_s(spec, here, here) == 9.01699
    assert cold.change_s(spec, here, on((V100, 2), turn=1)) == 0.0
    assert PartsWorld.generate(0).change_s(spec, None, here) == 0.004


def test_a_generated_world_is_as_described() -> None:
    world = PartsWorld.generate(3)
    assert len(world.part_s) == 8
    slowest = [part_s["K80"] / part_s["V100"] for part_s in world.part_s.values()]
    assert all(0.06 <= part_s["V100"] <= 0.6 for part_s in world.part_s.values())
    assert all(1.0 + 0.35 * 1.5 <= slow <= 6.3 for slow in slowest)
    assert world == PartsWorld.generate(3) == parse_world("parts", 3) != PartsWorld.generate(4)


@pytest.mark.parametrize("text", ["parts:switch=slow", "parts:speed=1"])
def test_unknown_settings_are_refused(text: str) -> None:
    with pytest.raises(UnknownName):
        parse_world(text)


def test_jobs_and_kinds_must_be_known() -> None:
    world, cluster = PartsWorld.generate(0), Cluster.build([(1, 1, "V100")])
    with pytest.raises(UnknownName, match="net"):
        world.prepare([Arrival(0.0, FOUR)], cluster)
    with pytest.raises(UnknownName, match="H100"):
        world.prepare([], Cluster.build([(1, 1, "H100")]))
    with pytest.raises(InputError, match="no length"):
        world.prepare([Arrival(0.0, JobSpec(JobId("a"), model="bert"))], cluster)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 20.0), st.sampled_from([1, 2, 4]), st.floats(0.0, 30.0), st.integers(1, 5), st.integers(0, 7)
        ),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from(["hare", "wsrtf", "allox", "hare-literal", "gavel-fifo"]),
)
@settings(max_examples=25, deadline=None)
def test_no_policy_beats_the_bound(drawn: list[tuple[float, int, float, int, int]], policy: str) -> None:
    world = PartsWorld.generate(1)
    models = list(world.part_s)
    jobs = sorted(
        (
            Arrival(at, JobSpec(JobId(f"j{i}"), parts, work, model=models[model], weight=float(weight)))
            for i, (at, parts, work, weight, model) in enumerate(drawn)
        ),
        key=lambda arrival: arrival.submit_s,
    )
    arrivals, cluster = world.prepare(jobs, Cluster.build([(1, 2, "V100"), (1, 4, "K80")]))
    reached = simulate(arrivals, cluster, parse_policy(policy), world).summary()
    assert reached.finished == len(jobs)
    assert world.weighted_jct_bound_s(arrivals, cluster) <= reached.weighted_jct_s * (1 + 1e-6) + 1e-6


class TestPartsOracle(EstimatorContract):
    models = ("vgg19", "bert")
    kinds = KINDS

    def make_estimator(self) -> Estimator:
        return PartsWorld.generate(0).estimator()
