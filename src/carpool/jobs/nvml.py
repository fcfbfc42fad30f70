"""NVML: what the NVIDIA driver reports about GPUs and their processes, through nvidia-ml-py.

CUDA is not initialized. nvidia-ml-py comes with the extra ``torch``; it is imported on first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# CUDA cores of a multiprocessor by compute capability, where not 128 (CUDA C++ Programming Guide, appendix 16).
_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


class NvmlUnavailable(Exception):
    """nvidia-ml-py is not installed, or no driver answers."""


class GpuProcess(NamedTuple):
    """A process that computes on a GPU."""

    pid: int
    memory_bytes: int = 0  # 0: unknown


class Nvml:
    """An initialized NVML library. GPUs are named by the index at which the driver lists them.

    Drivers differ in what they answer: a query without an answer returns None.
    """

    def __init__(self) -> None:
        """Initialize NVML. Raises `NvmlUnavailable`."""
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise NvmlUnavailable("nvidia-ml-py is not installed") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(f"the NVIDIA driver does not answer: {error}") from error
        self._pynvml: Any = pynvml

    @classmethod
    def open(cls) -> Nvml | None:
        """NVML, or None where it is unavailable."""
        try:
            return cls()
        except NvmlUnavailable:
            return None

    def close(self) -> None:
        self._pynvml.nvmlShutdown()

    def driver_version(self) -> str:
        return _text(self._query("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        """The number of GPUs, whatever CUDA_VISIBLE_DEVICES says."""
        return int(self._query("nvmlDeviceGetCount") or 0)

    def name(self, index: int) -> str:
        return _text(self._query_device(index, "nvmlDeviceGetName"))

    def uuid(self, index: int) -> str:
        """``GPU-…``; empty if unknown."""
        return _text(self._query_device(index, "nvmlDeviceGetUUID"))

    def index_of(self, uuid: str) -> int | None:
        """The index of a GPU by its UUID, with or without ``GPU-`` before it."""
        wanted = uuid.removeprefix("GPU-")
        found = (index for index in range(self.count()) if self.uuid(index).removeprefix("GPU-") == wanted)
        return next(found, None) if wanted else None

    def memory_bytes(self, index: int) -> int:
        """The memory of a GPU; 0 if unknown."""
        memory = self._query_device(index, "nvmlDeviceGetMemoryInfo")
        return int(memory.total) if memory is not None else 0

    def free_bytes(self, index: int) -> int:
        """The free memory of a GPU; 0 if unknown."""
        memory = self._query_device(index, "nvmlDeviceGetMemoryInfo")
        return int(memory.free) if memory is not None else 0

    def processes(self, index: int) -> list[GpuProcess] | None:
        return _processes(self._query_device(index, "nvmlDeviceGetComputeRunningProcesses"))

    def mps_processes(self, index: int) -> list[GpuProcess] | None:
        return _processes(self._query_device(index, "nvmlDeviceGetMPSComputeRunningProcesses"))

    def multiprocessors(self, index: int) -> int | None:
        """All multiprocessors of a GPU, however many a client of MPS may use."""
        cores = self._query_device(index, "nvmlDeviceGetNumGpuCores")
        capability = self._query_device(index, "nvmlDeviceGetCudaComputeCapability")
        return None if cores is None or capability is None else int(cores) // _CORES.get(tuple(capability), 128)

    def utilization(self, index: int) -> tuple[float, float] | None:
        """Portions of the last sampling period in which a kernel ran, and in which device memory was accessed."""
        rates = self._query_device(index, "nvmlDeviceGetUtilizationRates")
        return None if rates is None else (rates.gpu / 100.0, rates.memory / 100.0)

    def pcie_received_bytes_per_s(self, index: int) -> float | None:
        kilobytes = self._query_device(index, "nvmlDeviceGetPcieThroughput", self._pynvml.NVML_PCIE_UTIL_RX_BYTES)
        return None if kilobytes is None else kilobytes * 1024.0

    def _query_device(self, index: int, function: str, *args: Any) -> Any:
        handle = self._query("nvmlDeviceGetHandleByIndex", index)
        return None if handle is None else self._query(function, handle, *args)

    def _query(self, function: str, *args: Any) -> Any:
        """Call a function; None where this driver, or this nvidia-ml-py, does not support it."""
        try:
            return getattr(self._pynvml, function)(*args)
        except (self._pynvml.NVMLError, AttributeError):
            return None


def _text(value: Any) -> str:
    """A string, which older versions of nvidia-ml-py return as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _processes(rows: Any) -> list[GpuProcess] | None:
    return None if rows is None else [GpuProcess(int(row.pid), int(row.usedGpuMemory or 0)) for row in rows]
