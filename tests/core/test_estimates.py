"""What is believed where nothing but declarations is known."""

from __future__ import annotations

import pytest

from carpool.core.estimates import DeclaredEstimator
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Neighbour, Placement
from carpool.sim.worlds.base import PlainWorld

SPEC, OTHER = JobSpec(JobId("a"), 2, 10.0), JobSpec(JobId("b"), 2, 10.0)


def placed(count: int, fraction: float = 1.0, *beside: float) -> Placement:
    return Placement(((Kind("V100"), count),), fraction, neighbours=tuple(Neighbour(OTHER, each) for each in beside))


@pytest.mark.parametrize(
    ("placement", "rate"),
    [
        (placed(2), 1.0),
        (placed(1), 0.5),
        (placed(4), 2.0),
        (placed(2, 0.5), 0.5),
        (placed(2, 0.5, 0.5), 0.5),
        (placed(2, 1.0, 1.0), 0.5),
        (placed(2, 0.5, 0.5, 0.25), 0.4),
    ],
)
def test_declared_rates_are_those_of_the_plain_world(placement: Placement, rate: float) -> None:
    assert DeclaredEstimator().rate(SPEC, placement).mean == pytest.approx(rate)
    assert PlainWorld().pace(SPEC, 0.0, placement).rate == pytest.approx(rate)
