"""NVML queries against a fake nvidia-ml-py: answers, missing answers, and no library at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.jobs.nvml import GpuProcess, Nvml, NvmlUnavailable


class FakeError(Exception):
    """What the fake raises where the driver refuses."""


def one_gpu(index: int) -> str:
    if index:
        raise FakeError("invalid argument")
    return "handle"


def fake(**functions: Any) -> SimpleNamespace:
    """A binding to a driver with one GPU that supports the given functions only."""
    return SimpleNamespace(
        **{
            "NVMLError": FakeError,
            "NVML_PCIE_UTIL_RX_BYTES": 1,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": one_gpu,
        }
        | functions
    )


def opened(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", fake(**functions))
    return Nvml()


def test_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SimpleNamespace(pid=11, usedGpuMemory=7), SimpleNamespace(pid=12, usedGpuMemory=None)]
    nvml = opened(
        monkeypatch,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: "GPU-1-2",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=150),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: rows,
        nvmlDeviceGetNumGpuCores=lambda handle: 16896,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetPcieThroughput=lambda handle, counter: 2 * counter,
    )
    assert (nvml.count(), nvml.name(0), nvml.uuid(0), nvml.memory_bytes(0)) == (1, "NVIDIA H200", "GPU-1-2", 150)
    assert (nvml.index_of("1-2"), nvml.index_of("GPU-1-2"), nvml.index_of("3"), nvml.index_of("")) == (0, 0, None, None)
    assert nvml.processes(0) == [GpuProcess(11, 7), GpuProcess(12, 0)]
    assert nvml.multiprocessors(0) == 132
    assert (nvml.utilization(0), nvml.pcie_received_bytes_per_s(0)) == ((0.5, 0.25), 2048.0)
    assert nvml.processes(1) is None, "there is no such GPU"


def test_a_query_without_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: str) -> None:
        raise FakeError("not supported")

    nvml = opened(monkeypatch, nvmlDeviceGetMPSComputeRunningProcesses=refused)
    assert nvml.mps_processes(0) is None, "the driver refuses"
    assert nvml.processes(0) is None, "nvidia-ml-py has no such function"
    assert nvml.multiprocessors(0) is None
    assert nvml.utilization(0) is None
    assert nvml.pcie_received_bytes_per_s(0) is None
    assert (nvml.name(0), nvml.uuid(0), nvml.memory_bytes(0)) == ("", "", 0)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise FakeError("Driver Not Loaded")

    with pytest.raises(NvmlUnavailable, match="Driver Not Loaded"):
        opened(monkeypatch, nvmlInit=no_driver)
    assert Nvml.open() is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="nvidia-ml-py"):
        Nvml()
    assert Nvml.open() is None
