"""The loss curve: what it learns from pairs, in how much memory, and how honest it is about what remains."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.predictors.loss.curve import LossCurve

B0, B1, FLOOR = 0.001, 0.5, 0.2


def losses(steps: np.ndarray, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    clean = 1.0 / (B0 * steps + B1) + FLOOR
    return np.asarray(clean * (1.0 + noise * np.random.default_rng(seed).standard_normal(len(steps))))


def step_of(target: float) -> float:
    return (1.0 / (target - FLOOR) - B1) / B0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_a_clean_curve_is_found_whatever_the_scales_of_loss_and_steps(scale: float, unit: float) -> None:
    steps = np.arange(1.0, 800.0, 10.0)
    curve = LossCurve().fit(unit * steps, scale * losses(steps))
    b0, b1, b2 = curve.params_
    assert (b0 * scale * unit, b1 * scale, b2 / scale) == pytest.approx((B0, B1, FLOOR), rel=0.05)
    assert curve.predict([2000.0 * unit])[0] == pytest.approx(scale * losses(np.array([2000.0]))[0], rel=0.01)
    left = curve.remaining_to(0.5 * scale)
    assert left.mean == pytest.approx(unit * (step_of(0.5) - steps[-1]), rel=0.05)
    assert left.std < 0.1 * left.mean


def test_outliers_do_not_bend_it() -> None:
    steps = np.arange(1.0, 1200.0, 10.0)
    heard = losses(steps, 0.02)
    spoiled = heard.copy()
    spoiled[[30, 60, 90]] *= 5.0
    plain, robust = (LossCurve().fit(steps, each).remaining_to(0.5).mean for each in (heard, spoiled))
    assert robust == pytest.approx(plain, rel=0.25)


def test_what_remains_is_told_with_its_uncertainty() -> None:
    steps = np.arange(1.0, 5000.0)
    inside: list[bool] = []
    widths: dict[int, list[float]] = {200: [], 2000: []}
    for seed in range(12):
        heard = losses(steps, 0.05, seed)
        means = np.convolve(heard, np.full(10, 0.1), "valid")
        end = float(steps[9 + int(np.argmax(means <= 0.5))])
        for now in widths:
            left = LossCurve().fit(steps[:now:10], heard[:now:10]).remaining_to(0.5, window=10)
            inside.append(abs(left.mean - (end - steps[:now:10][-1])) <= 2.0 * left.std)
            widths[now].append(left.std / left.mean)
    assert np.mean(inside) >= 0.8
    assert np.mean(widths[2000]) < np.mean(widths[200])  # it gets surer


def test_a_noisy_mean_is_expected_at_the_target_before_the_curve() -> None:
    steps, target, window = np.arange(1.0, 9000.0), 0.45, 10
    reached = []
    for seed in range(12):
        heard = losses(steps, 0.2, seed)
        end = steps[9 + int(np.argmax(np.convolve(heard, np.full(window, 0.1), "valid") <= target))]
        now = int(0.7 * end)
        curve = LossCurve().fit(steps[:now:5], heard[:now:5])
        reached.append((curve.last_step + curve.remaining_to(target, window).mean) / end)
    assert np.mean(reached) == pytest.approx(1.0, abs=0.15)  # the curve itself gets there half as late again


def test_a_target_that_is_reached_leaves_next_to_nothing() -> None:
    steps = np.arange(1.0, 4000.0, 10.0)
    curve = LossCurve().fit(steps, losses(steps))
    assert curve.remaining_to(2.0).mean <= 0.01 * curve.last_step


def test_nothing_is_said_before_there_are_points() -> None:
    curve = LossCurve()
    assert curve.remaining_to(0.1).mean == np.inf
    assert curve.decline(10) is None
    curve.partial_fit(1.0, 2.0)
    assert not curve.is_known


def test_memory_is_bounded_and_the_answer_stays() -> None:
    steps = np.arange(1.0, 3001.0)
    small, large = LossCurve(32), LossCurve(4096)
    for curve in (small, large):
        curve.fit(steps, losses(steps))
    assert len(small.steps_) < 32
    assert small.stride_ > 1 == large.stride_
    assert small.remaining_to(0.45).mean == pytest.approx(large.remaining_to(0.45).mean, rel=0.1)


def test_steps_made_again_and_losses_that_are_no_numbers_are_left_out() -> None:
    curve = LossCurve().fit([1, 2, 3], [3.0, 2.0, 1.5])
    before = curve.state()
    curve.partial_fit(2.0, 9.0).partial_fit(4.0, float("nan"))
    assert curve.state() == before


def test_decline_and_level_of_the_last_steps() -> None:
    curve = LossCurve().fit(range(0, 210, 10), [10.0 - step / 100 for step in range(0, 210, 10)])
    assert curve.decline(100) == pytest.approx(1.0)
    assert curve.lately(20) == pytest.approx(8.05)  # steps 190 and 200
    assert curve.decline(500) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5.0, 5.0), min_size=5, max_size=40), st.floats(-5.0, 5.0))
def test_any_history_gets_a_sober_answer(heard: list[float], target: float) -> None:
    left = LossCurve().fit(np.arange(1.0, len(heard) + 1.0), heard).remaining_to(target, 10)
    assert 0.0 <= left.mean < np.inf
    assert 0.0 <= left.std < np.inf


def test_it_goes_on_from_what_was_kept() -> None:
    steps = np.arange(1.0, 500.0, 3.0)
    heard = losses(steps, 0.05)
    whole = LossCurve(64).fit(steps, heard)
    half = LossCurve(64).fit(steps[:80], heard[:80])
    resumed = LossCurve.restored(json.loads(json.dumps(half.state())))
    for step, loss in zip(steps[80:], heard[80:], strict=True):
        resumed.partial_fit(float(step), float(loss))
    assert resumed.state() == whole.state()
    assert resumed.remaining_to(0.5) == whole.remaining_to(0.5)
