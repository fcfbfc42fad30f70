"""MPS percentages, concurrent jobs, and fault isolation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.jobs.devices import LocalDevice
from carpool.runtime.sharing.lanes import FaultIsolation, max_concurrent_jobs, percent

A, B = ("a", 1), ("b", 1)


@pytest.mark.parametrize(("fraction", "cap"), [(1.0, 100), (0.4, 40), (1 / 3, 33), (0.001, 1)])
def test_percentage_of_a_fraction(fraction: float, cap: int) -> None:
    assert percent(fraction) == cap


def test_no_client_starts_before_all_have_exited() -> None:
    isolation = FaultIsolation[tuple[str, int]]()
    assert isolation.on_fault([A, B], [("a", 7), ("b", 3)]) is False  # two jobs: the culprit is unknown
    assert isolation.is_exiting(A)
    isolation.on_exit(A)
    assert not isolation.may_start("a")
    isolation.on_exit(B)
    assert isolation.may_start("a")
    assert not isolation.may_start("b")


def test_each_job_runs_alone_until_it_has_passed_its_step() -> None:
    isolation = FaultIsolation[tuple[str, int]]()
    isolation.on_fault([A, B], [("a", 7), ("b", 3)])
    isolation.on_exit(A)
    isolation.on_exit(B)
    isolation.on_progress("a", 7)
    assert not isolation.may_start("b")
    isolation.on_progress("a", 8)
    assert isolation.may_start("b")
    isolation.clear("b")
    assert not isolation.is_active
    assert isolation.may_start("c")


def test_a_job_that_faults_alone_is_to_blame() -> None:
    isolation = FaultIsolation[tuple[str, int]]()
    isolation.on_fault([A, B], [("a", 7), ("b", 3)])
    isolation.on_exit(A)
    isolation.on_exit(B)
    assert isolation.on_fault([("a", 2)], [("a", 7)]) is True
    assert not isolation.may_start("b")
    isolation.on_exit(("a", 2))
    assert isolation.may_start("a")


def test_a_second_fault_does_not_clear_a_job_sooner() -> None:
    isolation = FaultIsolation[tuple[str, int]]()
    isolation.on_fault([A, B], [("a", 7), ("b", 300)])
    isolation.on_fault([A, B], [("a", 5), ("b", 128)])  # b was still on its way from a mirror
    for client in (A, B):
        isolation.on_exit(client)
    isolation.on_progress("a", 8)
    isolation.on_progress("b", 129)
    assert not isolation.may_start("c")
    isolation.on_progress("b", 301)
    assert isolation.may_start("c")


def test_a_fault_of_the_only_job_is_its_own() -> None:
    isolation = FaultIsolation[tuple[str, int]]()
    assert isolation.on_fault([A], [("a", 7)]) is True
    isolation.on_exit(A)
    assert not isolation.is_active


@given(st.lists(st.sampled_from(["fault", "exit", "progress", "clear"]), max_size=30), st.data())
def test_two_suspects_never_run_at_the_same_time(events: list[str], data: st.DataObject) -> None:
    isolation, jobs = FaultIsolation[tuple[str, int]](), ["a", "b", "c"]
    suspects: set[str] = set()
    for event in events:
        job = data.draw(st.sampled_from(jobs))
        if event == "fault":
            isolation.on_fault([(name, 1) for name in jobs], [(name, 5) for name in jobs])
            suspects = set(jobs)
        elif event == "exit":
            isolation.on_exit((job, 1))
        elif event == "progress":
            isolation.on_progress(job, 6)
            suspects.discard(job)
        else:
            isolation.clear(job)
            suspects.discard(job)
        if suspects:
            assert sum(isolation.may_start(name) for name in jobs) <= 1


GPU = LocalDevice(0, "cuda:0", "H200", (), 0)
LANES = [
    LocalDevice(number, f"cuda:0@{percent}", f"H200@{percent}", (), 0, lane_percent=percent)
    for number, percent in enumerate((50, 25))
]


@pytest.mark.parametrize(
    ("device", "has_lanes", "limit"),
    [(GPU, True, 48), (GPU, False, 1), (LocalDevice(1, "cpu:0", "cpu2", (0, 1)), True, 2), (LANES[1], True, 24)],
)
def test_max_concurrent_jobs(device: LocalDevice, has_lanes: bool, limit: int) -> None:
    devices = LANES if device in LANES else [device]
    assert max_concurrent_jobs(devices, device, has_lanes=has_lanes) == limit
