"""Shares as caps, and who may come back after a fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice
from carpool.runtime.sharing.lanes import FaultIsolation, max_concurrent_jobs, percent

A, B = ("a", 1), ("b", 1)


@pytest.mark.parametrize(("fraction", "cap"), [(1.0, 100), (0.4, 40), (1 / 3, 33), (0.001, 1)])
def test_a_fraction_is_a_cap_in_percent(fraction: float, cap: int) -> None:
    assert percent(fraction) == cap


def test_nobody_starts_before_all_have_left() -> None:
    probation = FaultIsolation[tuple[str, int]]()
    assert probation.fault([A, B], [("a", 7), ("b", 3)]) is False  # nobody knows whose fault it was
    assert probation.is_leaving(A)
    probation.gone(A)
    assert not probation.may_start("a")
    probation.gone(B)
    assert probation.may_start("a")
    assert not probation.may_start("b")


def test_each_comes_back_alone_until_it_has_passed_its_step() -> None:
    probation = FaultIsolation[tuple[str, int]]()
    probation.fault([A, B], [("a", 7), ("b", 3)])
    probation.gone(A)
    probation.gone(B)
    probation.passed("a", 7)
    assert not probation.may_start("b")
    probation.passed("a", 8)
    assert probation.may_start("b")
    probation.over("b")
    assert not probation.is_on
    assert probation.may_start("c")


def test_whoever_faults_alone_is_to_blame() -> None:
    probation = FaultIsolation[tuple[str, int]]()
    probation.fault([A, B], [("a", 7), ("b", 3)])
    probation.gone(A)
    probation.gone(B)
    assert probation.fault([("a", 2)], [("a", 7)]) is True
    assert not probation.may_start("b")
    probation.gone(("a", 2))
    assert probation.may_start("a")


def test_a_second_fault_on_the_way_back_does_not_clear_anybody_sooner() -> None:
    probation = FaultIsolation[tuple[str, int]]()
    probation.fault([A, B], [("a", 7), ("b", 300)])
    probation.fault([A, B], [("a", 5), ("b", 128)])  # b was still on its way from a mirror
    for client in (A, B):
        probation.gone(client)
    probation.passed("a", 8)
    probation.passed("b", 129)
    assert not probation.may_start("c")
    probation.passed("b", 301)
    assert probation.may_start("c")


def test_one_job_on_the_gpu_has_nobody_else_to_blame() -> None:
    probation = FaultIsolation[tuple[str, int]]()
    assert probation.fault([A], [("a", 7)]) is True
    probation.gone(A)
    assert not probation.is_on


@given(st.lists(st.sampled_from(["fault", "gone", "passed", "over"]), max_size=30), st.data())
def test_never_are_two_suspects_let_in(events: list[str], data: st.DataObject) -> None:
    probation, jobs = FaultIsolation[tuple[str, int]](), ["a", "b", "c"]
    suspects: set[str] = set()
    for event in events:
        job = data.draw(st.sampled_from(jobs))
        if event == "fault":
            probation.fault([(name, 1) for name in jobs], [(name, 5) for name in jobs])
            suspects = set(jobs)
        elif event == "gone":
            probation.gone((job, 1))
        elif event == "passed":
            probation.passed(job, 6)
            suspects.discard(job)
        else:
            probation.over(job)
            suspects.discard(job)
        if suspects:
            assert sum(probation.may_start(name) for name in jobs) <= 1


GPU = LocalDevice(0, "cuda:0", "H200", (), 0)


@pytest.mark.parametrize(
    ("device", "has_lanes", "room"),
    [(GPU, True, 48), (GPU, False, 1), (LocalDevice(1, "cpu:0", "cpu2", (0, 1)), True, 2)],
)
def test_how_many_compute_at_the_same_time(device: LocalDevice, has_lanes: bool, room: int) -> None:
    assert max_concurrent_jobs(device, has_lanes=has_lanes) == room
