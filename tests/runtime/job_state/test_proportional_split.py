"""How pieces are dealt to devices, and how a cut is kept."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.actions import BatchSplit
from carpool.runtime.job_state.batch_split import BatchSplitter
from carpool.runtime.job_state.proportional_split import (
    SETTLED,
    DeviceSpeeds,
    as_owners,
    is_worth_it,
    segment_bytes,
    split_proportionally,
)
from carpool.runtime.job_state.types import JobOptions, ProcessGroupEpoch, Target, WorkerSlot
from carpool.runtime.process.protocol import Contributed, Ready

DEVICES = {0: LocalDevice(0, "cpu:0", "cpu1", cores=(0,)), 1: LocalDevice(1, "cpu:1", "cpu2", cores=(0, 1))}
BOTH = (WorkerSlot(0), WorkerSlot(1))


@given(st.integers(1, 300), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=8), st.integers(0, 2))
def test_every_piece_is_dealt_and_nobody_could_be_much_quicker(pieces: int, speeds: list[float], least: int) -> None:
    counts = split_proportionally(pieces, speeds, least)
    assert sum(counts) == pieces
    if pieces >= least * len(speeds):
        assert min(counts) >= least
    if least == 0:
        slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
        assert slowest <= pieces / sum(speeds) + 1 / min(speeds) + 1e-9


def test_like_devices_get_like_numbers_and_the_first_ones_the_rest() -> None:
    assert split_proportionally(8, [1.0, 1.0, 1.0], 1) == (3, 3, 2)
    assert as_owners((3, 3, 2)) == ((0, 3), (3, 6), (6, 8))


def test_a_change_must_be_worth_it() -> None:
    assert not is_worth_it((50, 50), (51, 49), [1.02, 1.0])
    assert is_worth_it((50, 50), (67, 33), [2.0, 1.0])


def test_a_segment_holds_two_slots_for_every_maximal_subtree() -> None:
    assert segment_bytes(((0, 3), (3, 6), (6, 8)), 10) == 2 * (2 + 2 + 1) * 10
    assert segment_bytes((), 10) == 0


def test_what_was_not_measured_is_guessed_from_what_was() -> None:
    speeds = DeviceSpeeds()
    speeds.guess(("small", 1.0), 1.0)
    speeds.guess(("large", 1.0), 2.0)
    speeds.measure(("small", 1.0), seconds=0.1, samples=10)
    assert speeds.of(("large", 1.0)) == pytest.approx(200.0)


def cutter(*cuts: BatchSplit) -> BatchSplitter:
    made = BatchSplitter(DEVICES, JobOptions(), cuts)
    made.ready = Ready("", 8, 30, None, 100)
    return made


def counts(made: BatchSplitter, step: int, *, is_new: bool = True) -> tuple[int, ...]:
    return made.shape(Target(1, BOTH), BOTH, step, by_token=False, now=None, is_new=is_new).counts


def test_steps_made_again_are_cut_as_the_first_time() -> None:
    made = cutter(BatchSplit(0, (0, 1), (10, 20)), BatchSplit(5, (0, 1), (4, 26)))
    assert [counts(made, step, is_new=False) for step in (0, 4, 5, 9)] == [(10, 20), (10, 20), (4, 26), (4, 26)]


def test_parts_follow_what_is_measured_once_that_is_settled() -> None:
    made = cutter()
    assert counts(made, 0) == (10, 20)
    shape = made.shape(Target(1, BOTH), BOTH, 0, by_token=False, now=None, is_new=True)
    assert made.record(0, shape) == BatchSplit(0, (0, 1), (10, 20))
    for _ in range(SETTLED):
        assert counts(made, 3) == (10, 20)
        made.measure(BOTH[0], Contributed(1, 0, 1.0, 10))
        made.measure(BOTH[1], Contributed(1, 0, 8.0, 20))
    assert counts(made, 3) == (24, 6)
    assert counts(made, 3, is_new=False) == (10, 20)


def test_one_slow_pass_is_not_dealt_for() -> None:
    made = cutter()
    made.record(0, made.shape(Target(1, BOTH), BOTH, 0, by_token=False, now=None, is_new=True))
    for number in range(SETTLED):
        made.measure(BOTH[0], Contributed(1, 0, 1.0, 10))
        made.measure(BOTH[1], Contributed(1, 0, 50.0 if number == 0 else 1.0, 20))
    assert counts(made, SETTLED) == (10, 20)


@pytest.mark.parametrize("exact", [False, True])
def test_a_cut_that_proves_worse_is_taken_back_and_tried_again_ever_later(exact: bool) -> None:
    """Devices that have cores in common: whoever gets less of the step is no quicker for it."""
    made = BatchSplitter(DEVICES, JobOptions(exact=exact, shards=8), ())
    made.ready = Ready("", 8, 30, None, 100)
    now: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(10 * SETTLED):
        shape = made.shape(Target(1, BOTH), BOTH, step, by_token=False, now=now, is_new=True)
        if now is None or shape != now.shape:
            shape = made.shape(Target(1, BOTH), BOTH, step, by_token=False, now=None, is_new=True)
            made.record(step, shape)
            now = ProcessGroupEpoch(step, (1, 2), shape, step, 0.0)
        held.append(shape.counts)
        is_first = shape.counts == held[0]
        made.measure(BOTH[0], Contributed(1, 0, 2.0 if is_first else 4.0, shape.counts[0]))
        made.measure(BOTH[1], Contributed(1, 0, 1.0 if is_first else 2.0, shape.counts[1]))
    runs = [(counts == held[0], len(list(run))) for counts, run in itertools.groupby(held)]
    assert runs[:4] == [(True, SETTLED), (False, SETTLED), (True, 2 * SETTLED), (False, SETTLED)]
    assert runs[4] == (True, 4 * SETTLED)


def test_an_order_for_other_parts_is_no_sign_that_dealing_by_speed_failed() -> None:
    made = cutter()
    now: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(12 * SETTLED):
        is_ordered = step // SETTLED % 2
        wish = Target(1 + step // SETTLED, BOTH, parts=(15, 15) if is_ordered else ())
        slow_down = 1.0 if step < 9 * SETTLED else 4.0  # late, the second device becomes slower than the first
        shape = made.shape(wish, BOTH, step, by_token=False, now=now, is_new=True)
        if now is None or shape != now.shape:
            made.record(step, shape)
            now = ProcessGroupEpoch(step, (1, 2), shape, step, 0.0)
        held.append(shape.counts)
        made.measure(BOTH[0], Contributed(1, 0, 0.4 * shape.counts[0], shape.counts[0]))
        made.measure(BOTH[1], Contributed(1, 0, slow_down * 0.1 * shape.counts[1], shape.counts[1]))
    free = [held[first : first + SETTLED] for first in range(0, 12 * SETTLED, 2 * SETTLED)]
    assert {counts for block in free[1:5] for counts in block} == {(6, 24)}
    assert set(free[5]) == {(15, 15)}  # by what was measured in the order's time


def test_parts_by_an_order_that_holds_no_more_are_left_at_once() -> None:
    made = cutter()
    now: ProcessGroupEpoch | None = None
    held: list[tuple[int, ...]] = []
    for step in range(3 * SETTLED):
        wish = Target(1 + step, BOTH, parts=(15, 15) if step in {2 * SETTLED, 2 * SETTLED + 1} else ())
        shape = made.shape(wish, BOTH, step, by_token=False, now=now, is_new=True)
        if now is None or shape != now.shape:
            made.record(step, shape)
            now = ProcessGroupEpoch(step, (1, 2), shape, step, 0.0)
        held.append(shape.counts)
        for seat, count, sample_s in zip(BOTH, shape.counts, (0.4, 0.1), strict=True):
            made.measure(seat, Contributed(1, 0, sample_s * count, count))
    assert held[2 * SETTLED - 1 :] == [(6, 24), (15, 15), (15, 15), *[(6, 24)] * (SETTLED - 2)]


def test_parts_that_were_ordered_are_kept_to() -> None:
    wish = Target(1, BOTH, parts=(29, 1))
    assert cutter().shape(wish, BOTH, 0, by_token=False, now=None, is_new=True).counts == (29, 1)


def test_the_batch_can_be_kept_per_device() -> None:
    made = BatchSplitter(DEVICES, JobOptions(batch_per_device=True), ())
    made.ready = Ready("", 8, 30, None, 100)
    assert [made.batch_size(Target(1), size) for size in (1, 2, 4)] == [30, 60, 100]


def test_parts_that_wait_for_each_other_in_a_pass_take_no_turns() -> None:
    made = BatchSplitter(DEVICES, JobOptions(sync_batchnorm=True), ())
    made.ready = cutter().ready
    together = made.shape(Target(1, BOTH), BOTH, 0, by_token=True, now=None, is_new=True)
    alone = made.shape(Target(1, BOTH[:1]), BOTH[:1], 0, by_token=True, now=None, is_new=True)
    assert (together.by_token, alone.by_token) == (False, True)


def test_threads_follow_the_cores_of_a_device_and_on_a_gpu_those_asked_for() -> None:
    devices = {0: LocalDevice(0, "cuda:0", "H200", cuda=0), 1: LocalDevice(1, "cpu:0", "cpu4", (0, 1, 2, 3))}
    asking, plain = BatchSplitter(devices, JobOptions(cpus=6), ()), BatchSplitter(devices, JobOptions(), ())
    assert [asking.threads(WorkerSlot(device, 0.5)) for device in (0, 1)] == [6, 2]
    assert plain.threads(WorkerSlot(0, 1.0)) == 1
