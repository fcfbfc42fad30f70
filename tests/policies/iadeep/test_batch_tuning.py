"""Batches from what steps show: tried where they may be better, kept while others are hardly better, within memory."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.model import Allocation, Job, JobId, JobSpec, Kind, Phase
from carpool.core.topology import Placement
from carpool.policies.iadeep.batch_tuning import best_step, tunes_by_steps

KIND = Kind("cpu1")
ALONE = Placement(((KIND, 1),))
SPEC = JobSpec(JobId("a"), batch_size=32, batch_range=(8, 2048))


@dataclass(frozen=True, slots=True)
class Steps(DeclaredEstimator):
    """Steps take `fixed` and a thousandth for each sample, which takes a byte; gradients are as noisy as it is told."""

    predicts_goodput = True
    counts_steps = True

    noise: float = 1000.0
    fixed: float = 1.0
    spread: float = 0.0

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        rate = 1.0 / (self.fixed + 0.001 * (placement.batch_size or spec.batch_size))
        return Estimate(rate, rate * self.spread)

    def goodput(self, spec: JobSpec, kind: Kind, batch_size: int) -> Estimate:
        return Estimate(1.0)

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        return batch_size / 32 * (self.noise + 32) / (self.noise + batch_size)

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return batch_size or spec.batch_size


def holding(batch_size: int, spec: JobSpec = SPEC) -> Job:
    held = Allocation.of(0, batch_size=batch_size)
    return Job(spec, 0, 0.0, Phase.RUNNING, held, 1, held, 1)


def chosen(estimates: Steps, has: int, *, capacity: int = 0, trust: float = 1.1) -> int:
    return best_step(estimates, holding(has), ALONE, capacity, growth=4, trust=trust)


def test_a_batch_grows_step_by_step_to_the_best() -> None:
    estimates, has, seen = Steps(), 32, []
    for _ in range(6):
        has = chosen(estimates, has)
        seen.append(has)
    assert all(later <= 4 * before for before, later in zip([32, *seen], seen, strict=False))
    assert 500 <= seen[-1] <= 2000  # m* = √(1 · 1000 / 0.001) = 1000
    assert seen[-1] == seen[-2], "and stays there"


def test_what_a_job_has_stays_until_something_is_much_better() -> None:
    assert chosen(Steps(), 32, trust=1e6) == 32
    assert chosen(Steps(noise=1.0, fixed=0.0), 8) == 8, "clear gradients and no fixed cost: nothing is gained"
    assert chosen(Steps(noise=1.0, fixed=0.0), 0) == 8, "nor is there a reason for more than the least"


def test_what_is_not_known_well_is_tried_where_it_may_be_better() -> None:
    hardly = Steps(noise=40.0, fixed=0.06)
    assert chosen(hardly, 32) == 32
    assert chosen(replace(hardly, spread=0.5), 32) > 32


def test_what_was_measured_but_jumps_about_is_not_gone_back_to() -> None:
    better = Steps(noise=1000.0, fixed=0.4)  # 99 is two and a half times as good as 32
    assert chosen(better, 32, trust=2.4) == 99
    assert chosen(replace(better, spread=0.2), 32, trust=2.4) == 32


@given(st.integers(40, 10_000), st.sampled_from([8, 32, 100, 512, 2048]))
def test_no_batch_is_chosen_that_memory_has_no_room_for(capacity: int, has: int) -> None:
    found = chosen(Steps(), has, capacity=capacity)
    assert found == has or 1.1 * found <= capacity or found == 32


@pytest.mark.parametrize(
    "spec", [replace(SPEC, exact=True), replace(SPEC, batch_range=None), replace(SPEC, batch_size=0)]
)
def test_only_batches_that_may_change_and_are_known_are_tuned(spec: JobSpec) -> None:
    assert tunes_by_steps(Steps(), holding(0))
    assert not tunes_by_steps(Steps(), holding(0, spec))
    assert not tunes_by_steps(DeclaredEstimator(), holding(0))
