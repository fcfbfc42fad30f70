"""A world of links: what is true in it, and how near policies come who have to learn it."""

from __future__ import annotations

from random import Random

import pytest

from carpool.core.errors import CarpoolError, InputError
from carpool.core.estimates import DeclaredEstimator
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Cluster, Placement
from carpool.policies.registry import parse_policy
from carpool.predictors.links.estimator import LinkEstimator
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds import parse_world
from carpool.sim.worlds.wired import WiredWorld

CLUSTER = Cluster.build([(3, 4, "A"), (3, 4, "B")])
A = Kind("A")


def jobs(number: int, seed: int = 0) -> list[Arrival]:
    random, at, found = Random(seed), 0.0, []
    for place in range(number):
        at += random.expovariate(1 / 60)
        spec = JobSpec(
            JobId(f"j{place}"), random.choice((1, 2)), random.lognormvariate(6.0, 0.7), f"m{random.randrange(3)}"
        )
        found.append(Arrival(at, spec))
    return found


def prepared(seed: int, number: int = 12) -> tuple[WiredWorld, list[Arrival]]:
    world = parse_world("wired", seed)
    assert isinstance(world, WiredWorld)
    arrivals, _ = world.prepare(jobs(number), CLUSTER)
    return world, list(arrivals)


def test_what_a_job_asked_for_is_its_unit() -> None:
    world, arrivals = prepared(0)
    for _, spec in arrivals:
        assert world.rate(spec, Placement(((A, spec.devices),))) == pytest.approx(1.0)
        assert spec.narrowest == 1


def test_the_network_is_never_faster_than_the_node() -> None:
    world, arrivals = prepared(1)
    for _, spec in arrivals:
        assert world.rate(spec, Placement(((A, 2), (A, 2)))) <= world.rate(spec, Placement(((A, 4),)))


def test_large_states_are_dear_to_move() -> None:
    world, arrivals = prepared(2)
    here, there = Placement(((A, 1),)), Placement(((A, 2),))
    by_state = sorted((spec.memory_bytes, world.change_s(spec, here, there)) for _, spec in arrivals)
    assert by_state == sorted(by_state, key=lambda pair: pair[1])
    assert by_state[0][1] > 1.0


def test_says_what_is_wrong() -> None:
    with pytest.raises(InputError, match="has no length"):
        WiredWorld().prepare([Arrival(0.0, JobSpec(JobId("a")))], CLUSTER)
    with pytest.raises(CarpoolError, match="has named the cluster"):
        WiredWorld().estimator()


def test_equal_seeds_give_equal_worlds() -> None:
    (one, arrivals), (other, _), (third, _) = prepared(3), prepared(3), prepared(4)
    spec, place = arrivals[0].spec, Placement(((A, 1), (A, 3)))
    assert one.rate(spec, place) == other.rate(spec, place) != third.rate(spec, place)


def test_learning_the_links_comes_near_to_knowing_them() -> None:
    """Average completion time: within a quarter of the oracle's, and ahead of those who believe in proportion."""
    found = {}
    for name in ("learned", "told", "in proportion"):
        world, arrivals = prepared(1)
        estimator = {"learned": world.estimator(), "told": world.oracle(), "in proportion": DeclaredEstimator()}[name]
        summary = simulate(arrivals, CLUSTER, parse_policy("elastic"), world, estimator=estimator).summary()
        assert summary.finished == len(arrivals)
        found[name] = summary.avg_jct_s
    assert found["learned"] <= 1.25 * found["told"]
    assert found["learned"] < found["in proportion"]


def test_prices_of_moves_are_learned_on_the_way() -> None:
    world, arrivals = prepared(5)
    estimator = world.estimator()
    assert isinstance(estimator, LinkEstimator)
    simulate(arrivals, CLUSTER, parse_policy("elastic"), world, estimator=estimator)
    known = estimator.moves.cost
    assert known.num_moves > len(arrivals)
    here = Placement(((A, 1),))
    for _, spec in arrivals[:4]:
        truth = world.change_s(spec, here, here)
        found = estimator.move_s(spec)
        assert found is not None
        assert found == pytest.approx(truth, rel=0.5)
