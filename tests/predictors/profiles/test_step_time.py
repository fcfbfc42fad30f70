"""Step time by batch size."""

import pytest

from carpool.predictors.profiles.batch_models import StepTime


def test_the_line_is_found_through_noise_and_its_error_is_told() -> None:
    batches = [8, 16, 32, 64, 128, 256]
    wobble = [1.03, 0.97, 1.02, 0.98, 1.01, 0.99]
    model = StepTime().fit(batches, [(0.010 + 0.0002 * m) * w for m, w in zip(batches, wobble, strict=True)])
    assert model.fixed_s_ == pytest.approx(0.010, rel=0.05)
    assert model.per_sample_s_ == pytest.approx(0.0002, rel=0.05)
    assert 0.01 < model.error_ < 0.05
    assert model.predict(100).std == pytest.approx(model.predict(100).mean * model.error_)


def test_neither_part_is_negative() -> None:
    model = StepTime().fit([10, 20, 40], [0.001, 0.004, 0.016])  # steeper than a line through zero
    assert model.fixed_s_ == 0.0
    assert model.per_sample_s_ > 0.0


def test_one_point_is_all_per_sample_and_unsure() -> None:
    model = StepTime().fit([50], [0.1])
    assert model.predict(100).mean == pytest.approx(0.2)
    assert model.error_ >= 0.3
