"""The noise scale, against gradients whose noise is known."""

from math import isnan

import numpy as np
import pytest

from carpool.predictors.loss.gradient_noise import NoiseScale

DIMENSIONS = 400


def learned(sizes: list[int], signal: float, sigma: float, steps: int, newest: float = 0.01) -> NoiseScale:
    """Per-sample gradients are G + σ·z, so that φ = DIMENSIONS·σ²/|G|²."""
    chance = np.random.default_rng(3)
    scale = NoiseScale(newest=newest)
    true = np.full(DIMENSIONS, signal / np.sqrt(DIMENSIONS))
    for _ in range(steps):
        parts = [true + sigma / np.sqrt(size) * chance.standard_normal(DIMENSIONS) for size in sizes]
        whole = sum(size / sum(sizes) * part for size, part in zip(sizes, parts, strict=True))
        scale.partial_fit(sizes, [float(part @ part) for part in parts], float(whole @ whole))
    return scale


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [2, 5, 9, 16], [1, 31]])
def test_parts_of_any_sizes_tell_the_same_scale(sizes: list[int]) -> None:
    found = learned(sizes, signal=1.0, sigma=0.5, steps=300).predict()
    assert found.mean == pytest.approx(DIMENSIONS * 0.25, rel=0.1)
    assert abs(found.mean - DIMENSIONS * 0.25) < 4 * found.std + 1.0


def test_without_noise_the_scale_is_zero() -> None:
    assert learned([4, 4], signal=1.0, sigma=0.0, steps=3).predict().mean == pytest.approx(0.0, abs=1e-9)


def test_numerator_and_denominator_are_averaged_apart() -> None:
    """The mean of single ratios is far off where |G|² is small: here some are negative."""
    found = learned([4, 4], signal=0.15, sigma=0.05, steps=2000, newest=0.001).predict()
    assert found.mean == pytest.approx(DIMENSIONS * 0.05**2 / 0.15**2, rel=0.25)


def test_nothing_seen_is_nothing_known() -> None:
    assert isnan(NoiseScale().predict().mean)


def test_newer_steps_count_more() -> None:
    scale = NoiseScale(newest=0.5)
    for _ in range(20):
        scale.partial_fit([1, 1], [2.0, 2.0], 1.0)
    before = scale.predict().mean
    for _ in range(20):
        scale.partial_fit([1, 1], [1.0, 1.0], 1.0)
    assert before == pytest.approx(float("inf"))
    assert scale.predict().mean == pytest.approx(0.0, abs=1e-3)
