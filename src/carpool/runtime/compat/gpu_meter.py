"""GPU meter: samples utilization and PCIe throughput through NVML while a training runs."""

from __future__ import annotations

import threading
from statistics import fmean
from typing import Any, NamedTuple

import torch

_EVERY_S = 0.05
_PCIE_RX = 1  # nvml.h: NVML_PCIE_UTIL_RX_BYTES


class GpuUse(NamedTuple):
    """Means over a while; None: the driver does not tell."""

    device: float | None  # portion of the time in which a kernel ran
    bandwidth: float | None  # portion of the time in which device memory was read or written
    received_bytes_per_s: float | None  # over PCIe, by the whole device


class GpuMeter:
    """Asks the driver again and again, from a thread, until it is stopped."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._busy: list[tuple[float, float]] = []
        self._received: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    @classmethod
    def start(cls, device: torch.device) -> GpuMeter | None:
        """Begin to ask about a device; None on a CPU and where nobody answers."""
        if device.type != "cuda":
            return None
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except Exception:  # noqa: BLE001 - no binding, no driver, or an old one: the figures are told as unknown
            return None
        meter = cls(pynvml, handle)
        meter._thread.start()
        return meter

    def stop(self) -> GpuUse:
        """What was heard."""
        self._over.set()
        self._thread.join()
        device = fmean(busy for busy, _ in self._busy) if self._busy else None
        bandwidth = fmean(busy for _, busy in self._busy) if self._busy else None
        return GpuUse(device, bandwidth, fmean(self._received) if self._received else None)

    def _ask(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                use = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
                self._busy.append((use.gpu / 100.0, use.memory / 100.0))
                kilobytes = self._nvml.nvmlDeviceGetPcieThroughput(self._handle, _PCIE_RX)
                self._received.append(kilobytes * 1024.0)
            except self._nvml.NVMLError:
                return
