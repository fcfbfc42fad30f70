"""Which settings a profile is made of."""

import pytest

from carpool.core.errors import InputError
from carpool.jobs.devices import LocalDevice, parse_devices
from carpool.runtime.profiling.sweep import SweepPoint, check_batches, default_batches, settings, widths

ONE = LocalDevice(0, "cpu:0", "cpu1", (0,))
TWO = LocalDevice(1, "cpu:1", "cpu1", (1,))


def test_default_batches_lie_around_the_own_one_and_within_the_data() -> None:
    assert default_batches(64, 10_000) == (8, 16, 32, 64, 128, 256)
    assert default_batches(64, 100) == (8, 16, 32, 64)
    assert default_batches(1, 10) == (1, 2, 4)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    assert check_batches((64, 8, 64), 100) == (8, 64)
    with pytest.raises(InputError, match="batch 101; the data holds 100 samples"):
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


def test_every_kind_is_measured() -> None:
    unlike = parse_devices("cpu:2x1,1x2", cores=range(4))
    kinds = [setting.devices[0].kind for setting in settings(unlike, 8, (), (1.0,), exact=False)]
    assert kinds == ["cpu1", "cpu1", "cpu2"]  # alone, two of them, and the large one


def test_widths_double_up_to_all_while_there_are_samples_for_everybody() -> None:
    assert widths(1, 64) == []
    assert widths(6, 64) == [2, 4, 6]
    assert widths(6, 8) == [2, 4]
