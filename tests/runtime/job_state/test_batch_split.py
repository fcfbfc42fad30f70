"""Layout of steps on devices, micro-batches and learning-rate gain."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.actions import BatchSplit
from carpool.runtime.job_state.batch_split import BatchSplitter, LearningRateGain, MemoryShortage, why_not_split
from carpool.runtime.job_state.proportional_split import MIN_PASSES
from carpool.runtime.job_state.types import JobOptions, ProcessGroupEpoch, Target, WorkerSlot
from carpool.runtime.process.protocol import Contributed, Ready, WorkerFailed

DEVICES = {0: LocalDevice(0, "cpu:0", "cpu1", cores=(0,)), 1: LocalDevice(1, "cpu:1", "cpu2", cores=(0, 1))}
BOTH = (WorkerSlot(0), WorkerSlot(1))


def test_the_gain_is_unknown_without_noise_and_one_for_the_own_batch() -> None:
    gains = LearningRateGain()
    assert (gains.of(32, 32), gains.of(64, 32)) == (1.0, 0.0)
    gains.on_noise(96.0)
    assert gains.of(64, 32) == pytest.approx(2 * (96 + 32) / (96 + 64))
    assert gains.of(8, 32) == pytest.approx((96 + 32) / (96 + 8) / 4)


def test_a_gain_is_fixed_when_first_used() -> None:
    gains = LearningRateGain()
    gains.on_noise(96.0)
    first = gains.of(64, 32)
    gains.on_noise(1000.0)
    gains.on_noise(None)
    assert gains.of(64, 32) == first
    assert gains.of(128, 32) == pytest.approx(4 * (1000 + 32) / (1000 + 128))


def test_the_gain_compares_batches_on_equal_numbers_of_devices() -> None:
    device = LocalDevice(0, "cpu:0", "cpu1", (0,))
    made = BatchSplitter({0: device}, JobOptions(batch_per_device=True), ())
    made.ready = Ready("initial", 64, 32, 100, 10_000)
    made.lr_gain.on_noise(96.0)
    assert made.lr_gain_of(Target(1), 2) == 1.0
    assert made.lr_gain_of(Target(1, batch_size=64), 2) == pytest.approx(2 * (96 + 64) / (96 + 128))


def splitter(*splits: BatchSplit) -> BatchSplitter:
    made = BatchSplitter(DEVICES, JobOptions(), splits)
    made.ready = Ready("", 8, 30, None, 100)
    return made


def counts(made: BatchSplitter, step: int, *, is_new: bool = True) -> tuple[int, ...]:
    return made.layout(Target(1, BOTH), BOTH, step, time_sliced=False, current=None, is_new=is_new).counts


def test_replayed_steps_are_split_as_the_first_time() -> None:
    made = splitter(BatchSplit(0, (0, 1), (10, 20)), BatchSplit(5, (0, 1), (4, 26)))
    assert [counts(made, step, is_new=False) for step in (0, 4, 5, 9)] == [(10, 20), (10, 20), (4, 26), (4, 26)]


def test_parts_follow_measured_speeds_once_settled() -> None:
    made = splitter()
    assert counts(made, 0) == (10, 20)
    layout = made.layout(Target(1, BOTH), BOTH, 0, time_sliced=False, current=None, is_new=True)
    assert made.record(0, layout) == BatchSplit(0, (0, 1), (10, 20))
    for _ in range(MIN_PASSES):
        assert counts(made, 3) == (10, 20)
        made.on_pass(BOTH[0], Contributed(1, 0, 1.0, 10))
        made.on_pass(BOTH[1], Contributed(1, 0, 8.0, 20))
    assert counts(made, 3) == (24, 6)
    assert counts(made, 3, is_new=False) == (10, 20)


def test_one_slow_pass_does_not_change_the_split() -> None:
    made = splitter()
    made.record(0, made.layout(Target(1, BOTH), BOTH, 0, time_sliced=False, current=None, is_new=True))
    for number in range(MIN_PASSES):
        made.on_pass(BOTH[0], Contributed(1, 0, 1.0, 10))
        made.on_pass(BOTH[1], Contributed(1, 0, 50.0 if number == 0 else 1.0, 20))
    assert counts(made, MIN_PASSES) == (10, 20)


@pytest.mark.parametrize("exact", [False, True])
def test_a_slower_split_is_taken_back_and_tried_again_ever_later(exact: bool) -> None:
    """On devices that share cores a smaller part is not faster."""
    made = BatchSplitter(DEVICES, JobOptions(exact=exact, shards=8), ())
    made.ready = Ready("", 8, 30, None, 100)
    current: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(10 * MIN_PASSES):
        layout = made.layout(Target(1, BOTH), BOTH, step, time_sliced=False, current=current, is_new=True)
        if current is None or layout != current.layout:
            layout = made.layout(Target(1, BOTH), BOTH, step, time_sliced=False, current=None, is_new=True)
            made.record(step, layout)
            current = ProcessGroupEpoch(step, (1, 2), layout, step, 0.0)
        held.append(layout.counts)
        is_first = layout.counts == held[0]
        made.on_pass(BOTH[0], Contributed(1, 0, 2.0 if is_first else 4.0, layout.counts[0]))
        made.on_pass(BOTH[1], Contributed(1, 0, 1.0 if is_first else 2.0, layout.counts[1]))
    runs = [(counts == held[0], len(list(run))) for counts, run in itertools.groupby(held)]
    assert runs[:4] == [(True, MIN_PASSES), (False, MIN_PASSES), (True, 2 * MIN_PASSES), (False, MIN_PASSES)]
    assert runs[4] == (True, 4 * MIN_PASSES)


def test_ordered_parts_do_not_count_as_a_failed_split() -> None:
    made = splitter()
    current: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(12 * MIN_PASSES):
        is_ordered = step // MIN_PASSES % 2
        target = Target(1 + step // MIN_PASSES, BOTH, parts=(15, 15) if is_ordered else ())
        slow_down = 1.0 if step < 9 * MIN_PASSES else 4.0  # late, the second device becomes slower than the first
        layout = made.layout(target, BOTH, step, time_sliced=False, current=current, is_new=True)
        if current is None or layout != current.layout:
            made.record(step, layout)
            current = ProcessGroupEpoch(step, (1, 2), layout, step, 0.0)
        held.append(layout.counts)
        made.on_pass(BOTH[0], Contributed(1, 0, 0.4 * layout.counts[0], layout.counts[0]))
        made.on_pass(BOTH[1], Contributed(1, 0, slow_down * 0.1 * layout.counts[1], layout.counts[1]))
    free = [held[first : first + MIN_PASSES] for first in range(0, 12 * MIN_PASSES, 2 * MIN_PASSES)]
    assert {counts for block in free[1:5] for counts in block} == {(6, 24)}
    assert set(free[5]) == {(15, 15)}  # by what was measured in the order's time


def test_parts_of_an_expired_order_are_left_at_once() -> None:
    made = splitter()
    current: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(3 * MIN_PASSES):
        target = Target(1 + step, BOTH, parts=(15, 15) if step in {2 * MIN_PASSES, 2 * MIN_PASSES + 1} else ())
        layout = made.layout(target, BOTH, step, time_sliced=False, current=current, is_new=True)
        if current is None or layout != current.layout:
            made.record(step, layout)
            current = ProcessGroupEpoch(step, (1, 2), layout, step, 0.0)
        held.append(layout.counts)
        for slot, count, sample_s in zip(BOTH, layout.counts, (0.4, 0.1), strict=True):
            made.on_pass(slot, Contributed(1, 0, sample_s * count, count))
    assert held[2 * MIN_PASSES - 1 :] == [(6, 24), (15, 15), (15, 15), *[(6, 24)] * (MIN_PASSES - 2)]


def test_ordered_parts_are_used() -> None:
    target = Target(1, BOTH, parts=(29, 1))
    assert splitter().layout(target, BOTH, 0, time_sliced=False, current=None, is_new=True).counts == (29, 1)


def test_the_batch_can_be_kept_per_device() -> None:
    made = BatchSplitter(DEVICES, JobOptions(batch_per_device=True), ())
    made.ready = Ready("", 8, 30, None, 100)
    assert [made.batch_size(Target(1), size) for size in (1, 2, 4)] == [30, 60, 100]


def test_sync_batchnorm_is_not_time_sliced() -> None:
    made = BatchSplitter(DEVICES, JobOptions(sync_batchnorm=True), ())
    made.ready = splitter().ready
    together = made.layout(Target(1, BOTH), BOTH, 0, time_sliced=True, current=None, is_new=True)
    alone = made.layout(Target(1, BOTH[:1]), BOTH[:1], 0, time_sliced=True, current=None, is_new=True)
    assert (together.time_sliced, alone.time_sliced) == (False, True)


def test_threads_are_the_cores_of_a_device_or_on_a_gpu_those_requested() -> None:
    devices = {0: LocalDevice(0, "cuda:0", "H200", cuda=0), 1: LocalDevice(1, "cpu:0", "cpu4", (0, 1, 2, 3))}
    asking, plain = BatchSplitter(devices, JobOptions(cpus=6), ()), BatchSplitter(devices, JobOptions(), ())
    assert [asking.threads(WorkerSlot(device, 0.5)) for device in (0, 1)] == [6, 2]
    assert plain.threads(WorkerSlot(0, 1.0)) == 1


def test_a_leak_is_not_reported_as_a_batch_that_is_too_large() -> None:
    leak = WorkerFailed("memory", "out of memory", 1342, samples=1, growth="Memory grew from 1 MiB to 9 MiB: a leak.")
    shortage = MemoryShortage(leak, DEVICES[0], 64)
    words = why_not_split(shortage, JobOptions(), None)
    assert words.startswith("ran out of memory at step 1343. Memory grew")
    assert "out of memory." in words
    assert "needs more memory" not in words
    capped = replace(leak, growth="", limit="the memory cap allows (3 GiB, of which b keeps 2.2 GiB)")
    assert "of which b keeps" in MemoryShortage(capped, DEVICES[0], 64).description
    fits = MemoryShortage(replace(leak, growth=""), shortage.device, 64)
    assert why_not_split(fits, JobOptions(), None) == ""
