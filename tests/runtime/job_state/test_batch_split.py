"""What steps count for with another batch."""

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.batch_split import BatchSplitter, LearningRateGain
from carpool.runtime.job_state.types import JobOptions, Target
from carpool.runtime.process.protocol import Ready


def test_nobody_knows_before_the_noise_is_heard_and_the_own_batch_counts_for_one() -> None:
    gains = LearningRateGain()
    assert (gains.of(32, 32), gains.of(64, 32)) == (1.0, 0.0)
    gains.hear(96.0)
    assert gains.of(64, 32) == pytest.approx(2 * (96 + 32) / (96 + 64))
    assert gains.of(8, 32) == pytest.approx((96 + 32) / (96 + 8) / 4)


def test_a_gain_holds_for_as_long_as_the_job_lives() -> None:
    gains = LearningRateGain()
    gains.hear(96.0)
    first = gains.of(64, 32)
    gains.hear(1000.0)
    gains.hear(None)
    assert gains.of(64, 32) == first
    assert gains.of(128, 32) == pytest.approx(4 * (1000 + 32) / (1000 + 128))


def test_batches_per_device_are_compared_on_as_many_devices() -> None:
    device = LocalDevice(0, "cpu:0", "cpu1", (0,))
    cutter = BatchSplitter({0: device}, JobOptions(batch_per_device=True), ())
    cutter.ready = Ready("initial", 64, 32, 100, 10_000)
    cutter.gains.hear(96.0)
    assert cutter.gain(Target(1), 2) == 1.0
    assert cutter.gain(Target(1, batch_size=64), 2) == pytest.approx(2 * (96 + 64) / (96 + 128))
