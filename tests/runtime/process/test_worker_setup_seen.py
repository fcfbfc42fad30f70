"""What a process sees of its GPU against its lane."""

from __future__ import annotations

import pytest
import torch

from carpool.runtime.process.worker_setup import VisibleGpu, lane_note, lane_problem


@pytest.mark.parametrize(("asked", "seen"), [(33, 42), (40, 52), (50, 66), (100, 132), (1, 2)])
def test_what_mps_gives_is_no_problem(asked: int, seen: int) -> None:
    assert lane_problem(asked, VisibleGpu(seen, 132, True)) == ""


@pytest.mark.parametrize("asked", [1, 33, 50, 90])
def test_a_process_that_sees_the_whole_gpu_is_on_no_lane(asked: int) -> None:
    problem = lane_problem(asked, VisibleGpu(132, 132))
    assert problem == f"{asked} % were asked, 132 of 132 multiprocessors are seen: NVIDIA's MPS was not found"


def test_where_nobody_tells_how_many_there_are_the_driver_says_whether_mps_is_used() -> None:
    assert lane_problem(40, VisibleGpu(132)) == ""
    assert lane_problem(40, VisibleGpu(132, None, True)) == ""
    assert "40 % were asked, 132 multiprocessors" in lane_problem(40, VisibleGpu(132, None, False))


def test_a_whole_lane_without_mps_is_said_and_no_problem() -> None:
    seen = VisibleGpu(132, 132, False)
    assert lane_problem(100, seen) == ""
    assert lane_note(100, torch.device("cuda:0"), seen) == (
        "a lane of 100 % on cuda:0: 132 multiprocessors seen, without NVIDIA's MPS"
    )
