"""Figures by key, and between the sizes that have some."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.predictors.links.step_model import KeyIndex, Lookup, PerKeyParams

SIZES = st.sampled_from([1.0, 2.0, 3.0, 8.0, 20.0, 64.0])
KEYS = st.lists(st.tuples(st.integers(0, 2), SIZES), max_size=12)


def figures(keys: list[tuple[int, float]], scale: float = 1.0) -> PerKeyParams[tuple[int, float]]:
    keyed = KeyIndex(keys)
    return PerKeyParams(keyed, scale * np.array([key[0] + key[1] ** 1.5 for key in keyed.places]))


@given(KEYS, KEYS)
def test_between_two_sizes_of_a_training_figures_go_with_the_logarithm(
    known: list[tuple[int, float]], asked: list[tuple[int, float]]
) -> None:
    found = Lookup(asked, between=True)(figures(known))
    for (training, size), value in zip(asked, found.tolist(), strict=True):
        sizes = sorted({other for mine, other in known if mine == training})
        values = [training + other**1.5 for other in sizes]
        inside = bool(sizes) and sizes[0] <= size <= sizes[-1]
        assert value == pytest.approx(np.interp(np.log(size), np.log(sizes), values) if inside else 0.0)


def test_without_between_a_key_that_has_none_has_nothing() -> None:
    assert Lookup([(0, 2.0), (0, 3.0)])(figures([(0, 1.0), (0, 3.0)])).tolist() == [0.0, 3.0**1.5]


class Counting(dict[int, list[float]]):
    """Sizes by training that count how often they are looked at."""

    looked = 0

    def get(self, key: int, default: object = None) -> list[float]:
        self.looked += 1
        return super().get(key, default)  # type: ignore[arg-type]


def test_where_figures_stand_is_found_once_for_all_rows_of_a_fit() -> None:
    keyed = KeyIndex([(0, 1.0), (0, 4.0)])
    keyed.sizes = counting = Counting(keyed.sizes)
    lookup = Lookup([(0, 2.0)] * 5, between=True)
    for scale in (1.0, 2.0, 3.0):
        assert lookup(PerKeyParams(keyed, np.array([0.0, scale]))).tolist() == pytest.approx([scale / 2] * 5)
    assert counting.looked == 1
