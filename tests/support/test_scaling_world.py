"""Rates as a power of the number of devices."""

import pytest

from carpool.core.errors import CarpoolError
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Neighbour, Placement
from tests.support.scaling_world import ScalingWorld

SPEC = JobSpec(JobId("a"), 2, 10.0)
WORLD = ScalingWorld(exponent=0.5, speeds={"V100": 3.0, "K80": 0.5}, start_s=2.0, resize_s=1.0)
V100, K80 = Kind("V100"), Kind("K80")


def test_rate_is_one_on_what_was_asked_for_and_grows_with_the_exponent() -> None:
    assert ScalingWorld().rate(SPEC, Placement(((V100, 2),))) == 1.0
    assert WORLD.rate(SPEC, Placement(((V100, 8),))) == 3.0 * 2.0


def test_the_slowest_kind_sets_the_pace() -> None:
    assert WORLD.rate(SPEC, Placement(((K80, 1), (V100, 1)))) == 0.5
    assert WORLD.rate(SPEC, Placement(((Kind("T4"), 2),))) == 1.0


def test_shares_are_scaled_down_past_one() -> None:
    beside = Neighbour(SPEC, 0.75)
    assert ScalingWorld().rate(SPEC, Placement(((V100, 2),), 0.75)) == 0.75
    assert ScalingWorld().rate(SPEC, Placement(((V100, 2),), 0.75, 0, (beside,))) == 0.5


def test_prices_and_estimates() -> None:
    here = Placement(((V100, 2),))
    assert (WORLD.change_s(SPEC, None, here), WORLD.change_s(SPEC, here, here)) == (2.0, 1.0)
    assert WORLD.estimator().rate(SPEC, here).mean == WORLD.pace(SPEC, 0.0, here).rate == 3.0


def test_a_length_is_needed() -> None:
    with pytest.raises(CarpoolError, match="no length"):
        WORLD.work(JobSpec(JobId("a")))
