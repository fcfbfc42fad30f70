"""CUDA driver API: load libcuda and call its functions by name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache

from carpool.runtime.compat import Feature

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # cuda.h: CUDA_ERROR_OUT_OF_MEMORY
NOT_SUPPORTED = 801  # cuda.h: CUDA_ERROR_NOT_SUPPORTED
_MPS_ENABLED = 133  # cuda.h: CU_DEVICE_ATTRIBUTE_MPS_ENABLED

# The functions that each user of this module needs, with their names in cuda.h.
VIRTUAL_MEMORY = ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
STREAM_MEMORY_OPERATIONS = (
    *("cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"),
    *("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"),
)
GRAPH_EDITING = (
    *("cuGraphGetNodes", "cuGraphGetEdges_v2", "cuGraphClone", "cuGraphNodeFindInClone", "cuGraphDestroyNode"),
    *("cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphDestroy", "cuGraphExecDestroy"),
)
# Since driver 570: copy the GPU state of another process to host memory and back.
PROCESS_CHECKPOINT = (
    *("cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"),
    *("cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"),
)


class _LockArguments(ctypes.Structure):
    """cuda.h: CUcheckpointLockArgs."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class CudaDriverError(RuntimeError):
    """The driver is missing, lacks a function, or refused a call."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code  # CUresult; None: there was no call


@cache
def load() -> ctypes.CDLL:
    """Load libcuda. Raises `OSError` where no NVIDIA driver is installed."""
    return ctypes.CDLL(LIBRARY)


def call(name: str, *args: object) -> None:
    """Call a driver function. Raises `CudaDriverError` unless it returns CUDA_SUCCESS."""
    try:
        function = getattr(load(), name)
    except (OSError, AttributeError) as error:
        raise CudaDriverError(f"the NVIDIA driver has no {name}: {error}") from error
    if code := function(*args):
        raise CudaDriverError(f"CUDA error: {name} failed with code {code}", code)


def is_mps_client(device: int) -> bool | None:
    """Whether this process computes on a GPU through MPS; None where the driver does not answer."""
    found = ctypes.c_int()
    try:
        call("cuDeviceGetAttribute", ctypes.byref(found), _MPS_ENABLED, ctypes.c_int(device))
    except CudaDriverError:
        return None
    return bool(found.value)


def lock_process(pid: int, timeout_s: float) -> None:
    """Make all CUDA calls of a process wait, once the work that it has launched is done."""
    call("cuInit", 0)
    call("cuCheckpointProcessLock", ctypes.c_int(pid), ctypes.byref(_LockArguments(timeout_ms=int(timeout_s * 1000))))


def checkpoint_process(pid: int) -> None:
    """Copy the GPU memory of a locked process to its host memory, and free the GPU."""
    call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), None)


def restore_process(pid: int) -> None:
    """Copy the GPU memory of a process back; it stays locked."""
    call("cuInit", 0)
    call("cuCheckpointProcessRestore", ctypes.c_int(pid), None)


def unlock_process(pid: int) -> None:
    """Let the CUDA calls of a locked process continue."""
    call("cuCheckpointProcessUnlock", ctypes.c_int(pid), None)


def process_checkpoint_problem() -> str:
    """Why the driver cannot park processes; empty if it can."""
    return _missing(*PROCESS_CHECKPOINT)


def features() -> Iterator[Feature]:
    """The features of the driver in use, and whether they are available."""
    if problem := _missing():
        yield Feature("CUDA driver", problem, "GPUs cannot be used: install the NVIDIA driver.")
        return
    yield Feature(
        "virtual memory",
        _missing(*VIRTUAL_MEMORY),
        "Jobs that share a GPU under --memory-cap cannot be swapped out, and fail at start.",
    )
    yield Feature(
        "stream signals",
        _missing(*STREAM_MEMORY_OPERATIONS),
        "Jobs that take turns on a GPU are handed over by the CPU: the GPU idles between turns.",
    )
    yield Feature(
        "graph editing",
        _missing(*GRAPH_EDITING),
        "A job with branched CUDA graphs takes milliseconds of GPU time from the job whose turn precedes its own.",
    )
    yield Feature(
        "process checkpoints",
        process_checkpoint_problem(),
        "A paused command keeps its GPU memory, or is restarted: install driver 570 or newer.",
    )
    yield Feature(
        "MPS attribute", _missing("cuDeviceGetAttribute"), "A GPU share is verified by its multiprocessor count alone."
    )


def _missing(*names: str) -> str:
    try:
        library = load()
    except OSError as error:
        return str(error)
    absent = [name for name in names if not hasattr(library, name)]
    return f"the NVIDIA driver has no {', '.join(absent)}" if absent else ""
