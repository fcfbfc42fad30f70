"""What kinds cost against each other, and when that is asked again."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import JobId, JobSpec
from carpool.core.topology import Cluster
from carpool.policies.market.policy import Carpool
from carpool.policies.market.prices import KindPrices, Market, demand_of, relative_prices
from carpool.sim.engine import simulate
from carpool.sim.traces.trace import Arrival
from carpool.sim.worlds.parts import KINDS, PartsWorld


def market(fast: int, slow: int, *, slowness: float, work: float = 100.0) -> Market:
    """Jobs of one device: `fast` run well only on the first kind, `slow` run alike on both; one device of each."""
    rates = np.array([[1.0, slowness]] * fast + [[1.0, 1.0]] * slow)
    jobs = len(rates)
    return Market(rates, np.eye(2), np.ones(2), np.ones(jobs), np.full(jobs, work))


def test_a_kind_costs_as_much_less_as_jobs_get_on_worse_there() -> None:
    outlook = relative_prices(market(8, 0, slowness=0.25), 0.0)
    assert outlook.along is not None
    assert outlook.along[1] / outlook.along[0] == pytest.approx(0.25, rel=0.05)


def test_jobs_that_do_not_mind_make_a_slow_kind_as_dear_as_the_fast_one() -> None:
    outlook = relative_prices(market(1, 8, slowness=0.25), 0.0)
    assert outlook.along is not None
    assert outlook.along[1] / outlook.along[0] == pytest.approx(1.0, rel=0.05)


def test_it_says_nothing_where_nobody_would_wait() -> None:
    plenty = replace(market(3, 0, slowness=0.25), supply=np.array([9.0, 9.0]))
    assert relative_prices(plenty, 5.0).along is None


def test_it_holds_for_an_interval_unless_jobs_or_devices_change() -> None:
    now = market(6, 0, slowness=0.5)
    outlook = relative_prices(now, 10.0)
    assert outlook.until > 10.0
    assert outlook.holds(now, 10.0)
    assert outlook.holds(market(7, 0, slowness=0.5), 10.0)
    assert not outlook.holds(now, outlook.until)
    assert not outlook.holds(market(12, 0, slowness=0.5), 10.0)
    assert not outlook.holds(market(3, 0, slowness=0.5), 10.0)
    assert not outlook.holds(replace(now, supply=np.array([1.0, 2.0])), 10.0)


def test_it_comes_back_from_a_note_as_it_went_in() -> None:
    outlook = relative_prices(market(6, 0, slowness=0.5), 10.0)
    assert KindPrices.of_note(json.loads(json.dumps(outlook.as_note()))) == outlook


@given(st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(0.5, 5.0), st.floats(0.0, 1.0)), min_size=3, max_size=40))
def test_jobs_that_are_taken_together_are_as_much_as_before(jobs: list[tuple[float, float, float]]) -> None:
    work, weights, slow = (np.array(column) for column in zip(*jobs, strict=True))
    rates = np.column_stack([np.ones(len(jobs)), slow])
    all_of = Market(rates, np.eye(2), np.array([4.0, 4.0]), weights, work)
    one_by_one, together = demand_of(all_of), demand_of(all_of, most=3)
    assert len(one_by_one.work) == len(jobs)
    assert len(together.work) <= 4  # those that cannot use a kind are never taken together with those that can
    for column in ("work", "weights", "widths"):
        assert getattr(together, column).sum() == pytest.approx(getattr(one_by_one, column).sum())


def test_on_unlike_kinds_the_default_comes_near_to_what_no_schedule_can_beat() -> None:
    random, world = Random(2), PartsWorld.generate(2)
    specs = [
        JobSpec(
            JobId(f"j{number}"),
            random.choice((1, 2, 4)),
            random.lognormvariate(5.0, 1.0),
            random.choice(list(world.part_s)),
            weight=float(random.randint(1, 5)),
        )
        for number in range(40)
    ]
    arrivals, cluster = world.prepare(
        [Arrival(0.0, spec) for spec in specs], Cluster.build([(1, 5, kind) for kind in KINDS])
    )
    found = simulate(arrivals, cluster, Carpool(), world).summary()
    assert found.weighted_jct_s <= 1.11 * world.weighted_jct_bound_s(arrivals, cluster)


def test_a_dual_that_is_negative_by_rounding_counts_as_zero() -> None:
    along = KindPrices((-1e-9, 1.0), (2.0, 2.0), 8, 0.0).along
    assert along is not None
    assert along.tolist() == [0.0, 1.0]
    rates = np.ones((8, 2))
    market = Market(rates, np.eye(2), np.full(2, 2.0), np.ones(8), np.arange(1.0, 9.0))
    assert np.isfinite(market.clear(np.full(8, 0.5), along=along)).all()
