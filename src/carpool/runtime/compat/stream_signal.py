"""Stream signal: a CUDA stream waits for, and writes, a number in shared host memory."""

from __future__ import annotations

import ctypes
import mmap

import torch

from carpool.runtime.compat.cuda_driver import call

_DEVICE_MAP = 2  # cuda.h: CU_MEMHOSTREGISTER_DEVICEMAP
_AT_LEAST = 0  # cuda.h: CU_STREAM_WAIT_VALUE_GEQ


class StreamSignal:
    """The first word of a page, on the current stream of a GPU; the driver's stream memory operations access it."""

    def __init__(self, page: mmap.mmap, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._word = ctypes.c_ulonglong()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        call("cuMemHostRegister_v2", address, ctypes.c_size_t(len(page)), ctypes.c_uint(_DEVICE_MAP))
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(self._word), address, ctypes.c_uint(0))

    def hold_until(self, number: int) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        call("cuStreamWaitValue32_v2", stream, self._word, ctypes.c_uint(number), ctypes.c_uint(_AT_LEAST))

    def reach(self, number: int) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        call("cuStreamWriteValue32_v2", stream, self._word, ctypes.c_uint(number), ctypes.c_uint(0))
