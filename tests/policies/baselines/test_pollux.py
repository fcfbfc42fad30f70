"""Pollux: who gets how many devices, with which batch, and who moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from carpool.core.errors import InputError
from carpool.core.estimates import Estimate, Estimator
from carpool.core.messages import Assign, JobSubmitted, Order, ProgressReported, Woke
from carpool.core.model import Job, JobId, JobSpec
from carpool.core.policy import Policy
from carpool.core.topology import Placement
from carpool.policies.baselines.pollux import Pollux
from carpool.policies.registry import parse_policy
from carpool.sim.worlds.base import World
from carpool.testing import PolicyContract, Rig
from tests.support.scaling_world import ScalingWorld


class TestContract(PolicyContract):
    examples = 6
    max_jobs = 6

    def make_policy(self) -> Policy:
        return Pollux(iterations=5, interval_s=20.0)

    def make_world(self) -> World:
        return ScalingWorld(exponent=0.7, speeds={"V100": 3.0, "P100": 1.5, "K80": 0.5})


@dataclass(slots=True)
class Believes(Estimator):
    """An estimator that tunes batches, by a formula that a test may change."""

    tunes_batches = True

    rate_of: Callable[[int, bool], float] = lambda count, several: count**0.8 * (0.5 if several else 1.0)
    batch_of: Callable[[int], int] = lambda count: 32 * count
    asked: list[int] = field(default_factory=list)
    version: int = 0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(1.0)

    def remaining(self, job: Job, at: float) -> Estimate:
        return Estimate(1.0)

    def learn(self, at: float, job: Job, report: ProgressReported) -> None:
        return None

    def goodputs(self, spec: JobSpec, counts: Sequence[int], several: Sequence[bool]) -> Sequence[tuple[float, int]]:
        pairs = zip(counts, several, strict=True)
        return [(self.rate_of(count, spans), self.batch_of(count)) for count, spans in pairs]


def elastic(name: str, widest: int = 8) -> JobSubmitted:
    return JobSubmitted(JobSpec(JobId(name), 1, 100.0, min_devices=1, max_devices=widest))


def shapes(rig: Rig) -> dict[str, tuple[tuple[int, ...], int]]:
    """Devices on each node and the batch of every job that runs."""
    held = {name: job.desired for name, job in rig.scheduler.jobs.items() if job.desired is not None}
    groups = rig.scheduler.cluster.groups_of
    return {name: (tuple(count for _, count in groups(each)), each.batch_size) for name, each in held.items()}


def let_pass(rig: Rig, *times: float) -> list[Order]:
    """Let the backend answer at each of these instants, at which the policy is due anyway; the orders."""
    return [order for at in times for order in [*rig.answered(at), *rig.say(at, Woke())]]


def rig(estimator: Believes, groups: Sequence[tuple[int, int, str]] = ((2, 4, "V100"),)) -> Rig:
    return Rig(Pollux(), groups, estimator=estimator)


def test_a_job_doubles_step_by_step_and_takes_the_best_batch() -> None:
    table = rig(Believes(rate_of=lambda count, several: count**0.8))
    table.say(0.0, elastic("a"))
    assert shapes(table) == {"a": ((1,), 32)}
    seen = []
    for at in (600.0, 1200.0, 1800.0, 2400.0):
        let_pass(table, at)
        seen.append(shapes(table)["a"])
    assert seen == [((2,), 64), ((4,), 128), ((4, 4), 256), ((4, 4), 256)]


def test_devices_are_shared_so_that_nobody_is_far_behind() -> None:
    table = rig(Believes(), [(1, 4, "V100")])
    table.say(0.0, elastic("a"))
    let_pass(table, 600.0, 1200.0)
    assert shapes(table)["a"][0] == (4,)
    table.say(1230.0, elastic("b"))
    let_pass(table, 1290.0, 1890.0)
    assert {name: shape for name, (shape, _) in shapes(table).items()} == {"a": (2,), "b": (2,)}


def test_a_new_batch_alone_moves_nobody() -> None:
    believes = Believes(rate_of=lambda count, several: 1.0)
    table = rig(believes)
    table.say(0.0, elastic("a"))
    devices = list(table.job("a").desired.devices())  # type: ignore[union-attr]
    believes.batch_of = lambda count: 48 * count
    (order,) = let_pass(table, 60.0)
    assert isinstance(order, Assign)
    assert (list(order.allocation.devices()), order.allocation.batch_size) == (devices, 48)


def test_a_move_must_be_worth_its_price() -> None:
    """Twice the devices bring a quarter more: worth it for an old job, not for one that a move would set back."""
    little = Believes(rate_of=lambda count, several: {1: 1.0, 2: 1.25}.get(count, 1.25))
    table = rig(little, [(1, 2, "V100")])
    table.say(0.0, elastic("a", widest=2))
    let_pass(table, 60.0)
    assert shapes(table)["a"][0] == (1,)  # (60 − 0)/(60 + 30) = 0.67
    let_pass(table, 600.0)
    assert shapes(table)["a"][0] == (2,)  # 0.95, and no more than 0.9


def test_trust_bounds_what_a_move_may_promise() -> None:
    little = Believes(rate_of=lambda count, several: 1.0 if count == 1 else 1.08)
    table = rig(little, [(1, 2, "V100")])
    table.say(0.0, elastic("a", widest=2))
    let_pass(table, 1e6)
    assert shapes(table)["a"][0] == (1,)


def test_what_was_noted_of_jobs_that_are_over_is_forgotten() -> None:
    table = rig(Believes(), [(1, 2, "V100")])
    table.say(0.0, elastic("a"), elastic("b"))
    table.answered(0.0)
    assert table.scheduler.snapshot().note == {"a": [1, 1], "b": [1, 1]}
    table.say(600.0, table.backend.finish("a"))
    assert table.scheduler.snapshot().note == {"b": [2, 2]}


def test_unlike_kinds_are_searched_apart() -> None:
    table = rig(Believes(), [(1, 2, "V100"), (1, 2, "K80")])
    table.say(0.0, *map(elastic, "abcd"))
    kinds = [
        {table.scheduler.cluster.kind_of(device) for device in job.desired.devices()}
        for job in table.scheduler.jobs.values()
        if job.desired is not None
    ]
    assert sorted(map(sorted, kinds)) == [["K80"], ["K80"], ["V100"], ["V100"]]


def test_estimators_that_do_not_tune_are_asked_for_rates() -> None:
    table = Rig(Pollux(), [(1, 4, "V100")])
    table.say(0.0, elastic("a"))
    let_pass(table, 600.0, 1200.0)
    assert shapes(table) == {"a": ((4,), 0)}


@pytest.mark.parametrize("text", ["pollux:power=1", "pollux:growth=1", "pollux:trust=0", "pollux:trust=1.5"])
def test_impossible_parameters_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_policy(text)
