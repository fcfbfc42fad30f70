"""Optimus deals devices by what one more saves."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import pytest

from carpool.core.errors import UnknownName
from carpool.core.estimates import DeclaredEstimator, Estimate, Estimator
from carpool.core.messages import Assign, JobSubmitted, Order, ProgressReported
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.topology import Placement
from carpool.policies.baselines.optimus import Optimus
from carpool.sim.worlds.base import World
from carpool.testing import PolicyContract, Rig
from tests.support.scaling_world import ScalingWorld


class TestContract(PolicyContract):
    examples = 8

    def make_policy(self) -> Policy:
        return Optimus(interval_s=5.0)

    def make_world(self) -> World:
        return ScalingWorld(exponent=0.7, speeds={"V100": 3.0, "P100": 1.5, "K80": 0.5})


@dataclass(frozen=True, slots=True)
class Table(Estimator):
    """An estimator that counts steps: seconds of a step by number of devices, and steps left."""

    seconds: Mapping[str, tuple[float, ...]]
    left: Mapping[str, float]
    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(1.0)  # says nothing: who asks for steps does not need it

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(1.0)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        return None

    def step_s(self, spec: JobSpec, placement: Placement) -> float:
        return self.seconds[spec.id][placement.num_devices - 1]

    def steps_left(self, job: Job, at: float) -> float:
        return self.left[job.id]


def elastic(name: str, *, narrowest: int = 1, widest: int = 4) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), narrowest, 100.0, min_devices=narrowest, max_devices=widest))


def counts(orders: list[Order]) -> dict[str, int]:
    return {order.job: order.allocation.num_devices for order in orders if isinstance(order, Assign)}


def rig(estimator: Estimator, size: int = 4) -> Rig:
    return Rig(Optimus(), [(1, size, "V100")], estimator=estimator)


def test_greedy_is_best_where_gains_shrink() -> None:
    """With falling gains the greedy dealing has the least sum of remaining times: compare with all others."""
    seconds = {"a": (8.0, 4.5, 3.2, 2.6), "b": (6.0, 3.1, 2.2, 1.9), "c": (9.0, 7.0, 6.0, 5.5)}
    left = {"a": 10.0, "b": 30.0, "c": 20.0}
    found = counts(rig(Table(seconds, left), 6).say(0.0, *map(elastic, "abc")))
    total = {
        dealt: sum(left[name] * seconds[name][count - 1] for name, count in zip("abc", dealt, strict=True))
        for dealt in product(range(1, 5), repeat=3)
        if sum(dealt) <= 6
    }
    assert tuple(found[name] for name in "abc") == min(total, key=lambda dealt: total[dealt])


def test_devices_that_save_nothing_stay_free() -> None:
    estimator = Table({"a": (2.0, 1.5, 1.5, 0.1)}, {"a": 10.0})
    assert counts(rig(estimator).say(0.0, elastic("a"))) == {"a": 2}


def test_the_first_device_goes_by_submission() -> None:
    estimator = Table(dict.fromkeys("abc", (1.0, 0.9, 0.8, 0.7)), {"a": 1.0, "b": 1.0, "c": 1000.0})
    assert counts(rig(estimator, 2).say(0.0, *map(elastic, "abc"))) == {"a": 1, "b": 1}


def test_without_steps_rates_and_remaining_work_will_do() -> None:
    assert counts(rig(DeclaredEstimator()).say(0.0, elastic("a"), elastic("b"))) == {"a": 2, "b": 2}


def test_who_keeps_its_number_keeps_its_devices() -> None:
    table = rig(Table(dict.fromkeys("abc", (2.0, 1.0, 0.9, 0.9)), dict.fromkeys("abc", 1.0)), 5)
    table.say(0.0, elastic("a", widest=2), elastic("b", widest=2))
    table.answered(0.0)
    orders = table.say(1.0, elastic("c", widest=1))
    assert counts(orders) == {"c": 1}


def test_gangs_are_not_split() -> None:
    estimator = Table(dict.fromkeys("ab", (2.0, 1.0, 0.9, 0.8)), dict.fromkeys("ab", 1.0))
    assert counts(rig(estimator).say(0.0, elastic("a", narrowest=3), elastic("b", narrowest=2))) == {"a": 4}


def test_unknown_placements_are_refused() -> None:
    with pytest.raises(UnknownName):
        Optimus(placement="sprawl")
