"""Goodput: cutting batches, fitting step times, choosing the batch."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.predictors.loss.goodput import BatchLimits, Sample, ThroughputModel, _Errors, gain, tune

LIMITS = BatchLimits(reference=16, largest=1024, micro_min=4, micro_max=64)
TRUE = ThroughputModel(np.array([0.05, 0.002, 0.2, 0.01, 0.04, 0.004, 1.8]))


@pytest.mark.parametrize(
    ("batch", "count", "micro", "extra"),
    [
        (16, 1, 16, 0),  # the reference batch goes in one pass
        (32, 1, 16, 1),  # more than that in two, to measure the noise
        (32, 2, 16, 0),
        (30, 4, 8, 0),  # rounded up to equal parts
        (512, 2, 64, 3),  # what does not fit goes in several passes
        (1024, 3, 56, 5),  # never above the largest: 57 · 3 · 6 would be 1026
    ],
)
def test_cutting_a_batch(batch: int, count: int, micro: int, extra: int) -> None:
    assert LIMITS.cut(batch, count) == (micro, extra)


@given(st.integers(16, 1024), st.integers(1, 16))
def test_a_batch_that_was_rounded_is_cut_the_same_way_again(batch: int, count: int) -> None:
    micro, extra = LIMITS.cut(batch, count)
    assert LIMITS.cut(count * micro * (extra + 1), count) == (micro, extra)


def samples(*places: tuple[int, int, int]) -> list[Sample]:
    """What the true model would measure."""
    measured = []
    for nodes, count, micro in places:
        arrays = [np.array([float(number)]) for number in (count, micro, 0)]
        step_s = float(TRUE.step_s(np.array([nodes > 1]), *arrays)[0])
        grad_s = 0.05 + 0.002 * micro
        measured.append(Sample(nodes, count, micro, step_s, step_s - grad_s))
    return measured


def test_a_fit_predicts_what_was_not_measured() -> None:
    places = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 6), (4, 16)]
    seen = samples(*[(*place, micro) for place in places for micro in (8, 32, 64)])
    model = ThroughputModel().fit(seen)
    several, counts = np.array([False, True, True]), np.array([3.0, 6.0, 12.0])
    micro, extra = np.array([24.0, 48.0, 8.0]), np.array([0.0, 0.0, 2.0])
    expected = TRUE.step_s(several, counts, micro, extra)
    assert model.step_s(several, counts, micro, extra) == pytest.approx(expected, rel=0.1)


def test_what_was_never_tried_is_believed_to_be_perfect() -> None:
    model = ThroughputModel().fit(samples((1, 1, 16), (1, 1, 32)))
    alone, several = np.array([False, False]), np.array([True, True])
    counts, micro, extra = np.array([1.0, 8.0]), np.array([16.0, 16.0]), np.zeros(2)
    assert model.step_s(alone, counts, micro, extra)[1] == pytest.approx(0.082, rel=0.01)
    assert model.step_s(several, counts, micro, extra)[1] == pytest.approx(0.082, rel=0.01)


def test_the_network_is_no_better_than_the_node_that_was_tried() -> None:
    model = ThroughputModel().fit(samples((1, 1, 16), (1, 2, 16), (1, 4, 32)))
    arrays = [np.array([float(number)]) for number in (4, 16, 0)]
    assert model.step_s(np.array([True]), *arrays)[0] > model.step_s(np.array([False]), *arrays)[0]


def test_the_gradient_of_the_fit_is_that_of_its_objective() -> None:
    table = np.array(samples((1, 1, 16), (1, 2, 8), (1, 4, 32), (2, 4, 16), (4, 16, 64)))
    nodes, counts, micro, step_s, sync_s = table.T
    errors = _Errors(
        nodes > 1,
        (nodes == 1) & (counts > 1),
        np.maximum(counts - 2, 1e-8),
        micro,
        np.log(step_s - sync_s),
        np.log(step_s),
    )
    point, free = np.array([0.08, 0.003, 0.1, 0.02, 0.05, 0.003, 2.2]), np.ones(7)
    _, slopes = errors(point, free)
    for place in range(7):
        step = np.zeros(7)
        step[place] = 1e-6 * point[place]
        numeric = (errors(point + step, free)[0] - errors(point - step, free)[0]) / (2 * step[place])
        assert slopes[place] == pytest.approx(numeric, rel=1e-4)


def test_gain_lies_between_none_and_full() -> None:
    assert gain(np.array([64.0]), 16.0, 0.0)[0] == pytest.approx(1.0)  # no noise: larger batches bring nothing
    assert gain(np.array([64.0]), 16.0, 1e12)[0] == pytest.approx(4.0)  # noise alone: in proportion
    assert gain(np.array([16.0]), 16.0, 300.0)[0] == 1.0


@pytest.mark.parametrize("noise", [50.0, 400.0])
def test_the_best_batch_is_the_known_one(noise: float) -> None:
    """With T = a + b·m the best batch is √(a·φ/b); on two devices without synchronisation b is halved."""
    model = ThroughputModel(np.array([0.3, 0.004, 1e-8, 1e-8, 1e-8, 1e-8, 1.0]))
    rates, batches = tune(model, noise, BatchLimits(2, 4096, 1, 4096), (2, 4096), [False], [2])
    assert batches[0] == pytest.approx(sqrt(0.3 * noise / 0.002), rel=0.1)
    other = np.array([2.0 * batches[0]])
    worse = gain(other, 2.0, noise) / model.step_s(np.array([False]), np.array([2.0]), other / 2, np.zeros(1))
    assert rates[0] > worse[0]


def test_where_the_batch_cannot_be_cut_there_is_no_rate() -> None:
    limits = BatchLimits(8, 32, micro_min=8, micro_max=32)
    rates, batches = tune(TRUE, 100.0, limits, (8, 32), [False, False, True], [1, 4, 5])
    assert (rates > 0.0).tolist() == [True, True, False]
    assert batches[1] == 32


def test_one_batch_only() -> None:
    rates, batches = tune(TRUE, 100.0, LIMITS, (128, 128), [False, True], [1, 8])
    assert batches.tolist() == [128, 128]
    assert rates[1] > 0.0
