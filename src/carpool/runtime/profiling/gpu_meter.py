"""GPU meter: samples utilization and PCIe throughput through NVML while a training runs."""

from __future__ import annotations

import threading
from statistics import fmean
from typing import NamedTuple

import torch

from carpool.jobs.nvml import Nvml

_EVERY_S = 0.05


class GpuUse(NamedTuple):
    """Means of the samples; None: the driver does not report it."""

    device: float | None  # portion of the time in which a kernel ran
    bandwidth: float | None  # portion of the time in which device memory was read or written
    received_bytes_per_s: float | None  # over PCIe, by the whole device


class GpuMeter:
    """Samples one GPU from a thread until it is stopped."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._utilization: list[tuple[float, float]] = []
        self._received: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @classmethod
    def start(cls, device: torch.device) -> GpuMeter | None:
        """Start sampling a device; None on a CPU, and if NVML does not know the GPU."""
        nvml = Nvml.open() if device.type == "cuda" else None
        index = None if nvml is None else nvml.index_of(str(torch.cuda.get_device_properties(device).uuid))
        if nvml is None or index is None:
            return None
        meter = cls(nvml, index)
        meter._thread.start()
        return meter

    def stop(self) -> GpuUse:
        self._stopped.set()
        self._thread.join()
        device, bandwidth = map(fmean, zip(*self._utilization, strict=True)) if self._utilization else (None, None)
        return GpuUse(device, bandwidth, fmean(self._received) if self._received else None)

    def _sample(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            utilization = self._nvml.utilization(self._index)
            received = self._nvml.pcie_received_bytes_per_s(self._index)
            if utilization is not None:
                self._utilization.append(utilization)
            if received is not None:
                self._received.append(received)
