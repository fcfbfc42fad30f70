"""The settings of a profile."""

import pytest

from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.runtime.profiling.sweep import SweepPoint, check_batches, default_batches, device_counts, settings

ONE = LocalDevice(0, "cpu:0", "cpu1", (0,))
TWO = LocalDevice(1, "cpu:1", "cpu1", (1,))


def test_default_batches_surround_the_own_one_within_the_dataset() -> None:
    assert default_batches(64, 10_000) == (8, 16, 32, 64, 128, 256)
    assert default_batches(64, 100) == (8, 16, 32, 64)
    assert default_batches(1, 10) == (1, 2, 4)


def test_a_batch_larger_than_the_dataset_is_rejected() -> None:
    assert check_batches((64, 8, 64), 100) == (8, 64)
    with pytest.raises(InputError, match=r"batch 101;.*100 samples"):
        check_batches((101,), 100)


def test_batches_are_swept_on_one_device_and_the_rest_at_the_own_batch() -> None:
    assert settings([ONE, TWO], 32, (16,), (0.5, 1.0), paired=True) == [
        SweepPoint((ONE,), 16),
        SweepPoint((ONE,), 32),
        SweepPoint((ONE, TWO), 32),
        SweepPoint((ONE,), 32, 0.5),
        SweepPoint((ONE,), 32, 0.5, is_paired=True),
        SweepPoint((ONE,), 32, 1.0, is_paired=True),
        SweepPoint((ONE,), 32, exact=True),
    ]


def test_every_device_type_is_measured() -> None:
    heterogeneous = parse_devices("cpu:2x1,1x2", cores=range(4))
    kinds = [setting.devices[0].kind for setting in settings(heterogeneous, 8, (), (1.0,), exact=False)]
    assert kinds == ["cpu1", "cpu1", "cpu2"]  # one, two of them, and the large one


def test_device_counts_double_as_long_as_every_device_has_samples() -> None:
    assert device_counts(1, 64) == []
    assert device_counts(6, 64) == [2, 4, 6]
    assert device_counts(6, 8) == [2, 4]
