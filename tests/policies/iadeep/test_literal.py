"""IADeep as published: order of submission, least added degradation, no caps or moves, and one job tuned."""

from __future__ import annotations

import pytest

from carpool.core.messages import Assign
from carpool.core.model import JobId
from carpool.core.topology import Cluster
from carpool.policies.iadeep.literal import IADeepLiteral
from carpool.policies.iadeep.policy import IADeep
from carpool.testing import drive
from tests.policies.iadeep.test_policy import KIND, Truth, batches, job, starts


def joined(policy: IADeep, **first: object) -> str:
    """Which of two jobs on their own devices a third one joins."""
    arrivals = [job("a", 100.0, **first), job("b", 100.0), job("new", 100.0, at=1.0)]  # type: ignore[arg-type]
    run = drive(policy, Cluster.build([(1, 2, KIND)]), arrivals, Truth(beside=(1.0, 0.9)))
    start = {o.job: o.allocation for _, o in reversed(run.orders) if isinstance(o, Assign)}
    return next(other for other in ("a", "b") if start[JobId("new")].same_devices(start[JobId(other)]))


def test_degradation_counts_and_weights_do_not() -> None:
    assert joined(IADeepLiteral(), model="harmful") == "b"
    assert joined(IADeepLiteral(), weight=50.0) == "a"
    assert joined(IADeep(), weight=50.0) == "b"


def test_jobs_start_in_order_of_submission() -> None:
    arrivals = [job("first", 100.0), job("long", 1000.0, at=1.0), job("short", 5.0, at=2.0)]
    found = starts(IADeepLiteral(most=1), arrivals, Truth())
    assert found["long"] < found["short"]


def test_a_job_waits_if_it_would_end_earlier_on_an_empty_device() -> None:
    pair = [job("old", 100.0), job("new", 100.0, at=1.0)]
    assert starts(IADeepLiteral(), pair, Truth(beside=(1.0, 0.9)))["new"] == 1.0
    assert starts(IADeepLiteral(), pair, Truth(beside=(1.0, 0.3)))["new"] == pytest.approx(100.0, abs=1.0)


def test_jobs_have_no_caps_and_do_not_move() -> None:
    arrivals = [job("a", 200.0), job("b", 40.0), job("c", 200.0, at=1.0)]
    run = drive(IADeepLiteral(), Cluster.build([(1, 2, KIND)]), arrivals, Truth(beside=(1.0, 0.9)))
    assigned = [order for _, order in run.orders if isinstance(order, Assign)]
    assert {order.allocation.fractions for order in assigned} == {(1.0,)}
    for name in ("a", "c"):  # which share a device while the other one is free
        assert {tuple(order.allocation.devices()) for order in assigned if order.job == name} == {(0,)}


def test_only_the_newest_job_is_tuned() -> None:
    arrivals = [job("a", 900.0, batch_range=(32, 256)), job("b", 900.0, at=1.0, batch_range=(32, 256))]
    truth = Truth(beside=(1.0, 0.9), curve={32: 0.8, 64: 1.6, 128: 1.0, 256: 0.6})
    both, one = (batches(policy, arrivals, truth) for policy in (IADeep(settle_s=2.0), IADeepLiteral(settle_s=2.0)))
    assert len(set(one["b"])) > 2
    assert len(set(one["a"])) < len(set(both["a"]))
