"""What tried vectors teach: measured ones as measured, others by slowdowns, and by what batches cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.estimates import DeclaredEstimator, Estimate
from carpool.core.model import JobId, JobSpec, Kind
from carpool.core.topology import Placement
from carpool.policies.sharing.share_search import Setting, Vector
from carpool.policies.sharing.trial_model import Slowdown, TrialModel, sm_sensitivity

KIND = Kind("H200")
SPECS = [JobSpec(JobId(name), batch_size=64) for name in "ab"]
HALF, WHOLE = (Setting(0.5), Setting(0.5)), (Setting(1.0), Setting(1.0))
TRIED: dict[Vector, tuple[float, ...]] = {WHOLE: (0.6, 0.3), HALF: (0.5, 0.6)}


class Counting(DeclaredEstimator):
    """Counts steps: 100 a second alone, and each is worth its samples."""

    def rate(self, spec: JobSpec, placement: Placement) -> Estimate:
        return Estimate(100.0)

    def progress(self, spec: JobSpec, batch_size: int) -> float:
        return batch_size / 64

    def memory(self, spec: JobSpec, batch_size: int = 0) -> int:
        return 7


def asked(taught: TrialModel, *vectors: Vector) -> list[list[float]]:
    mixes = [[(spec, *setting) for spec, setting in zip(SPECS, vector, strict=True)] for vector in vectors]
    return [[estimate.mean for estimate in row] for row in taught.mixed(KIND, mixes)]


def test_what_was_measured_is_told_as_measured() -> None:
    taught = TrialModel(Counting(), SPECS, TRIED)
    assert asked(taught, WHOLE, HALF) == [[60.0, 30.0], [50.0, 60.0]]


def test_a_batch_of_which_nothing_is_known_costs_half_of_its_growth() -> None:
    taught = TrialModel(Counting(), SPECS, TRIED)
    ((_, own),) = asked(taught, (Setting(0.4), Setting(0.6)))
    ((_, double),) = asked(taught, (Setting(0.4), Setting(0.6, 128)))
    assert double == pytest.approx(own / 1.5)


def test_a_tried_batch_teaches_what_larger_ones_cost() -> None:
    """With twice the batch steps were as quick and progress doubled: four times the batch costs nothing either."""
    model = Slowdown().fit([(1.0, 1.0), (0.5, 0.5)], list(TRIED.values()))
    kept = model.predict((0.5, 0.5))
    taught = TrialModel(Counting(), SPECS, {**TRIED, (Setting(0.5), Setting(0.5, 128)): (kept[0], 2.0 * kept[1])})
    ((_, own),) = asked(taught, (Setting(0.4), Setting(0.6)))
    ((_, fourfold),) = asked(taught, (Setting(0.4), Setting(0.6, 256)))
    assert fourfold == pytest.approx(own)


def test_what_it_does_not_know_is_asked_of_others() -> None:
    taught = TrialModel(Counting(), SPECS, TRIED)
    assert taught.progress(SPECS[0], 128) == 2.0
    assert taught.memory(SPECS[0]) == 7
    assert taught.own_batch(SPECS[0]) == 64


def test_hunger_is_what_a_cap_costs_alone() -> None:
    assert sm_sensitivity([(0.5, 0.5)]) == pytest.approx(1.0)
    assert sm_sensitivity([(1.0, 1.0), (0.5, 1.02)]) == 0.0
    assert sm_sensitivity([]) == sm_sensitivity([(1.0, 1.0)])


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_more_work_of_a_neighbour_never_helps(low: float, high: float, first: float, second: float) -> None:
    low, high = sorted((low, high))
    model = Slowdown().fit([(1.0, 1.0), (0.5, 0.5)], [(first, second)] * 2, [[(0.5, 0.7)], [(0.5, 0.9)]])
    assert model.predict((0.5, high))[0] <= model.predict((0.5, low))[0] + 1e-9
    assert model.predict((low, 0.5))[0] <= model.predict((high, 0.5))[0] + 1e-9
