import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import InputError, UnknownName
from carpool.federated.partition import SCHEMES, Partition

LABELS = np.repeat(np.arange(10), 100)


@given(st.sampled_from(SCHEMES), st.integers(1, 12), st.integers(0, 300), st.integers(0, 99))
def test_every_sample_is_on_one_device(scheme: str, num_parts: int, size: int, seed: int) -> None:
    labels = np.arange(size) % 7
    parts = Partition(scheme, seed=seed).split(size, num_parts, labels)
    assert len(parts) == num_parts
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))
    again = Partition(scheme, seed=seed).split(size, num_parts, labels)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


def test_equal_parts() -> None:
    assert [len(part) for part in Partition().split(1000, 4)] == [250] * 4


def test_parts_of_given_sizes() -> None:
    assert [len(part) for part in Partition(sizes=(5, 3, 2)).split(1000, 3)] == [500, 300, 200]


def test_a_small_alpha_skews_labels_and_a_large_one_does_not() -> None:
    def distinct(alpha: float) -> float:
        parts = Partition("labels", alpha=alpha).split(1000, 5, LABELS)
        return float(np.mean([len(np.unique(LABELS[part])) for part in parts]))

    assert distinct(0.05) < 6 < distinct(1000.0)


def test_a_small_alpha_skews_sizes_but_not_labels() -> None:
    parts = Partition("sizes", alpha=0.3).split(1000, 4)
    assert max(map(len, parts)) > 2 * min(map(len, parts))
    largest = max(parts, key=len)
    assert len(np.unique(LABELS[largest])) == 10


def test_bad_partitions_are_refused() -> None:
    with pytest.raises(UnknownName):
        Partition("random")
    with pytest.raises(InputError):
        Partition("labels").split(10, 2)
    with pytest.raises(InputError):
        Partition(sizes=(1, 2)).split(10, 3)
    with pytest.raises(InputError):
        Partition("labels", sizes=(1, 2))
    with pytest.raises(InputError):
        Partition("labels").split(10, 2, [1, 2])
