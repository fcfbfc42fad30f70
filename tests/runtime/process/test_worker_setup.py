from __future__ import annotations

import pytest
import torch

from carpool.runtime.process.worker_setup import StartupTimer, VisibleGpu, lane_note, lane_problem


def test_the_startup_timer_lists_phases() -> None:
    instants = iter([10.0, 10.25, 11.0])
    timer = StartupTimer(lambda: next(instants))
    timer.lap("entry")
    timer.lap("move to cuda:0")
    assert timer.summary() == "ready after 1.000 s: entry 0.250 s, move to cuda:0 0.750 s"


@pytest.mark.parametrize(("requested", "visible"), [(33, 42), (40, 52), (50, 66), (100, 132), (1, 2)])
def test_the_lane_that_mps_gives_is_accepted(requested: int, visible: int) -> None:
    assert lane_problem(requested, VisibleGpu(visible, 132, True)) == ""


@pytest.mark.parametrize("requested", [1, 33, 50, 90])
def test_a_process_that_sees_the_whole_gpu_is_not_on_its_lane(requested: int) -> None:
    problem = lane_problem(requested, VisibleGpu(132, 132))
    assert all(part in problem for part in (f"{requested} %", "132 of 132"))


def test_without_a_total_the_driver_tells_whether_mps_is_used() -> None:
    assert lane_problem(40, VisibleGpu(132)) == ""
    assert lane_problem(40, VisibleGpu(132, None, True)) == ""
    assert "40 %" in lane_problem(40, VisibleGpu(132, None, False))


def test_a_whole_lane_without_mps_is_noted() -> None:
    visible = VisibleGpu(132, 132, False)
    assert lane_problem(100, visible) == ""
    note = lane_note(100, torch.device("cuda:0"), visible)
    assert all(part in note for part in ("100 %", "cuda:0", "132", "without MPS"))
