"""NVML binding through ctypes: GPU processes, memory and multiprocessor counts while jobs run.

`gpus.py` and `gpumeter.py` ask through a package that may be missing; what is asked here again and again must not
depend on it. The signatures are those of nvml.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_MOST_PROCESSES = 256  # of one GPU that are looked at
_UNKNOWN_BYTES = (1 << 64) - 1  # nvml.h: NVML_VALUE_NOT_AVAILABLE
_UUID_BYTES = 96
# Cores of a multiprocessor by compute capability, where it is not 128 (CUDA C++ Programming Guide, appendix 16).
_CORES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    memory_bytes: int = 0  # 0: the driver does not tell


class Nvml:
    """A driver that answers; GPUs are named by the place it lists them in."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Nvml | None:
        """None where there is no driver, or it is broken."""
        try:
            library = ctypes.CDLL(_LIBRARY)
            answered = library.nvmlInit_v2() == 0
        except (OSError, AttributeError):
            return None
        return cls(library) if answered else None

    def count(self) -> int:
        """GPUs that there are."""
        number = ctypes.c_uint()
        return number.value if self._ask("nvmlDeviceGetCount_v2", ctypes.byref(number)) else 0

    def uuid(self, place: int) -> str:
        """A GPU's name for ever; empty if it is not told."""
        text = ctypes.create_string_buffer(_UUID_BYTES)
        told = self._ask_of(place, "nvmlDeviceGetUUID", text, ctypes.c_uint(_UUID_BYTES))
        return text.value.decode("ascii") if told else ""

    def computing(self, place: int) -> list[GpuProcess] | None:
        """The processes that compute on a GPU; None if it is not told."""
        return self._listed(place, "nvmlDeviceGetComputeRunningProcesses_v3")

    def clients(self, place: int) -> list[GpuProcess] | None:
        """Those of them that are clients of MPS; None if it is not told."""
        return self._listed(place, "nvmlDeviceGetMPSComputeRunningProcesses_v3")

    def _listed(self, place: int, question: str) -> list[GpuProcess] | None:
        number, rows = ctypes.c_uint(_MOST_PROCESSES), (_ProcessInfo * _MOST_PROCESSES)()
        if not self._ask_of(place, question, ctypes.byref(number), rows):
            return None
        return [
            GpuProcess(int(row.pid), 0 if row.used_bytes == _UNKNOWN_BYTES else int(row.used_bytes))
            for row in rows[: number.value]
        ]

    def multiprocessors(self, place: int) -> int | None:
        """All that a GPU has, whatever a process may see of them; None if it is not told."""
        cores, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        if not self._ask_of(place, "nvmlDeviceGetNumGpuCores", ctypes.byref(cores)):
            return None
        if not self._ask_of(place, "nvmlDeviceGetCudaComputeCapability", ctypes.byref(major), ctypes.byref(minor)):
            return None
        return cores.value // _CORES.get((major.value, minor.value), 128)

    def _ask_of(self, place: int, question: str, *into: object) -> bool:
        handle = ctypes.c_void_p()
        if not self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(place), ctypes.byref(handle)):
            return False
        return self._ask(question, handle, *into)

    def _ask(self, question: str, *into: object) -> bool:
        """Whether it answered: an older driver may not know the question."""
        function = getattr(self._library, question, None)
        return function is not None and function(*into) == 0
