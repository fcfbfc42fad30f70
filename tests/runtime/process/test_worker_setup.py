# ruff: noqa: N802 - the names are NVIDIA's
"""Startup times, the check of a GPU lane, and the NVML calls behind it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from carpool.runtime.compat.nvml import GpuProcess, Nvml
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


class FakeLibrary:
    """Answers like NVIDIA's, for one GPU with 132 multiprocessors and two processes."""

    def nvmlDeviceGetCount_v2(self, into: Any) -> int:
        into._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, place: ctypes.c_uint, into: Any) -> int:
        into._obj.value = 0xABC
        return 0 if place.value == 0 else 2

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, size: ctypes.c_uint) -> int:
        assert handle.value == 0xABC
        text.value = b"GPU-1-2"
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, number: Any, rows: Any) -> int:
        assert number._obj.value == len(rows)
        number._obj.value = 2
        rows[0].pid, rows[0].used_bytes = 11, 7
        rows[1].pid, rows[1].used_bytes = 12, 2**64 - 1
        return 0

    def nvmlDeviceGetNumGpuCores(self, handle: ctypes.c_void_p, into: Any) -> int:
        into._obj.value = 16896
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0


def test_the_driver_is_asked_in_its_own_language() -> None:
    nvml = Nvml(FakeLibrary())  # type: ignore[arg-type]
    assert nvml.count() == 1
    assert nvml.uuid(0) == "GPU-1-2"
    assert nvml.computing(0) == [GpuProcess(11, 7), GpuProcess(12, 0)]
    assert nvml.multiprocessors(0) == 132
    assert nvml.clients(0) is None  # unknown function
    assert nvml.computing(1) is None  # no such GPU


def test_an_old_driver_lacks_functions() -> None:
    nvml = Nvml(object())  # type: ignore[arg-type]
    assert nvml.count() == 0
    assert nvml.uuid(0) == ""
    assert nvml.computing(0) is None
    assert nvml.multiprocessors(0) is None
