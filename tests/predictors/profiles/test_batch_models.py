"""Memory by batch size: what was not measured is foretold, and the model never falls."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.predictors.profiles.batch_models import MemoryModel

MIB = float(1 << 20)


def true_bytes(batch: float) -> float:
    return (40.0 + 0.5 * batch + 0.002 * batch**2) * MIB


def test_batches_that_were_not_measured_are_foretold() -> None:
    seen = (8, 16, 32, 64, 128)
    model = MemoryModel().fit(seen, [true_bytes(batch) for batch in seen])
    for batch in (4, 24, 96, 256):
        assert model.predict(batch).mean == pytest.approx(true_bytes(batch), rel=0.01)
    assert model.error_ < 0.01
    assert model.margin_ == model.least_margin


def test_two_points_make_a_line_and_one_a_constant() -> None:
    line = MemoryModel().fit((10, 20), [20.0, 30.0])
    assert line.predict(40).mean == pytest.approx(50.0)
    assert line.margin_ >= 0.05  # nothing is known of its errors
    assert MemoryModel().fit((10,), [20.0]).predict(40).mean == pytest.approx(20.0)


def test_the_margin_grows_with_errors_and_covers_them() -> None:
    seen = (8, 16, 32, 64, 128)
    wobble = (1.0, 1.1, 0.92, 1.07, 1.0)
    taken = [true_bytes(batch) * by for batch, by in zip(seen, wobble, strict=True)]
    model = MemoryModel().fit(seen, taken)
    assert model.margin_ > 0.1
    assert model.margin_ >= 2 * model.error_
    assert all(model.bound(batch) >= size for batch, size in zip(seen, taken, strict=True))


def test_the_largest_batch_that_fits() -> None:
    seen = (8, 16, 32, 64, 128)
    model = MemoryModel().fit(seen, [true_bytes(batch) for batch in seen])
    best = model.largest(200 * MIB)
    assert model.bound(best) <= 200 * MIB < model.bound(best + 1)
    assert model.largest(1.0) == 0


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=8, unique=True),
    st.lists(st.floats(1.0, 1e12), min_size=8, max_size=8),
)
def test_it_never_falls_and_is_never_negative(batches: list[int], sizes: list[float]) -> None:
    model = MemoryModel().fit(batches, sizes[: len(batches)])
    asked = [model.predict(batch).mean for batch in np.geomspace(1, 10_000, 30)]
    assert asked[0] >= 0.0
    assert all(later >= sooner * (1 - 1e-12) for sooner, later in pairwise(asked))
