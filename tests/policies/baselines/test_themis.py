"""Finish-time fairness: leases go to those who are treated worst."""

import pytest

from carpool.core.errors import InputError
from carpool.core.messages import Assign
from carpool.core.topology import Cluster
from carpool.policies.baselines.themis import Themis
from carpool.testing import Driven, check_state, drive
from carpool.testing.scenarios import job

ONE = Cluster.build([(1, 1, "V100")])


def moves(run: Driven) -> list[tuple[float, str, bool]]:
    return [(at, order.job, isinstance(order, Assign)) for at, order in run.orders]


def test_the_worst_treated_gets_the_lease_and_keeps_it_while_it_is() -> None:
    # at 10 s: a has rho (10 + 20) / 30 = 1, b (10 + 20) / 20 = 1.5; at 20 s: a (20 + 20) / 30 = 1.33, b still 1.5
    arrivals = [job("a", work=30.0), job("b", work=20.0)]
    run = drive(Themis(lease_s=10.0, fraction=0.01), ONE, arrivals, check=check_state)
    assert moves(run) == [(0.0, "a", True), (10.0, "a", False), (10.0, "b", True), (30.0, "a", True)]


def test_a_lease_is_not_broken() -> None:
    arrivals = [job("a", work=30.0), job("tiny", work=0.5, at=1.0)]
    run = drive(Themis(lease_s=10.0), ONE, arrivals)
    assert moves(run) == [(0.0, "a", True), (10.0, "a", False), (10.0, "tiny", True), (10.5, "a", True)]


def test_among_those_offered_waiting_must_hurt_most() -> None:
    two = Cluster.build([(1, 2, "V100")])
    arrivals = [job("busy", 2, 10.0), job("wide", 2, 4.0, at=1.0), job("narrow", 1, 4.5, at=1.0)]
    strict = moves(drive(Themis(fraction=0.01, lease_s=50.0), two, arrivals))
    assert strict[1] == (10.0, "wide", True)  # rho 13 / 4 against 13.5 / 4.5
    loose = moves(drive(Themis(fraction=1.0, lease_s=50.0), two, arrivals))
    assert loose[1] == (10.0, "narrow", True)  # half the devices for nearly the same gain


@pytest.mark.parametrize(("fraction", "lease_s"), [(0.0, 1.0), (1.5, 1.0), (0.5, 0.0)])
def test_ranges(fraction: float, lease_s: float) -> None:
    with pytest.raises(InputError, match="must be in"):
        Themis(fraction=fraction, lease_s=lease_s)
