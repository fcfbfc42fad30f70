"""Proportional split of pieces by speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice
from carpool.runtime.job_state.proportional_split import (
    DeviceSpeeds,
    as_owners,
    is_worth_it,
    segment_bytes,
    split_proportionally,
)
from carpool.runtime.job_state.types import WorkerSlot

DEVICES = {0: LocalDevice(0, "cpu:0", "cpu1", cores=(0,)), 1: LocalDevice(1, "cpu:1", "cpu2", cores=(0, 1))}
BOTH = (WorkerSlot(0), WorkerSlot(1))


@given(st.integers(1, 300), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=8), st.integers(0, 2))
def test_every_piece_is_assigned_and_no_split_is_much_faster(pieces: int, speeds: list[float], least: int) -> None:
    counts = split_proportionally(pieces, speeds, least)
    assert sum(counts) == pieces
    if pieces >= least * len(speeds):
        assert min(counts) >= least
    if least == 0:
        slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
        assert slowest <= pieces / sum(speeds) + 1 / min(speeds) + 1e-9


def test_equal_devices_get_equal_counts_and_the_first_ones_the_rest() -> None:
    assert split_proportionally(8, [1.0, 1.0, 1.0], 1) == (3, 3, 2)
    assert as_owners((3, 3, 2)) == ((0, 3), (3, 6), (6, 8))


def test_a_new_split_must_be_worth_it() -> None:
    assert not is_worth_it((50, 50), (51, 49), [1.02, 1.0])
    assert is_worth_it((50, 50), (67, 33), [2.0, 1.0])


def test_a_segment_holds_two_slots_for_every_maximal_subtree() -> None:
    assert segment_bytes(((0, 3), (3, 6), (6, 8)), 10) == 2 * (2 + 2 + 1) * 10
    assert segment_bytes((), 10) == 0


def test_an_unmeasured_speed_is_guessed_from_measured_ones() -> None:
    speeds = DeviceSpeeds()
    speeds.guess(("small", 1.0), 1.0)
    speeds.guess(("large", 1.0), 2.0)
    speeds.measure(("small", 1.0), seconds=0.1, samples=10)
    assert speeds.of(("large", 1.0)) == pytest.approx(200.0)
