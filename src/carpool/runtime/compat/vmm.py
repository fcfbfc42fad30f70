"""CUDA virtual memory: address ranges whose physical memory is mapped and unmapped.

A recorded graph holds raw addresses. Memory that is unmapped goes back to the device for others; mapped again, the
addresses are the same and the recording is as good as before. What was in it is lost.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

_CHUNK = 2 << 20  # bytes: the granularity of all NVIDIA GPUs with virtual memory management
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, …_ALLOCATION_TYPE_PINNED, …_ACCESS_FLAGS


class Region(Protocol):
    """A range of addresses with a part in use at its begin."""

    @property
    def size(self) -> int:
        """Bytes in use."""
        ...

    def grow(self, num_bytes: int) -> int:
        """Take more into use, with memory behind it; where it begins, in bytes from the region's begin."""
        ...

    def bytes(self) -> Tensor:
        """What is in use, as a tensor of bytes."""
        ...

    def clear(self) -> None:
        """Have nothing in use; it must have memory."""
        ...

    def unmap(self) -> None:
        """Give the memory back; the addresses stay taken."""
        ...

    def map(self) -> None:
        """Have memory behind the addresses again, with any content."""
        ...


class HostRegion:
    """Pages of this process; those that are given back read as zeros."""

    def __init__(self, reserve: int = 1 << 30) -> None:
        self._pages = mmap.mmap(-1, reserve, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = 0

    def grow(self, num_bytes: int) -> int:
        """Take more into use; pages are there when they are touched."""
        start = self.size
        self.size = start + _rounded(num_bytes)
        if self.size > len(self._pages):
            raise MemoryError(f"a region of {len(self._pages)} bytes is asked for {self.size}")
        return start

    def bytes(self) -> Tensor:
        """What is in use."""
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=self.size)

    def clear(self) -> None:
        """Have nothing in use."""
        self.unmap()
        self.size = 0

    def unmap(self) -> None:
        """Give the pages back to the system."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Nothing to do: touching a page brings one."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    """Some bytes that a GPU can reach, in the form in which torch takes over what others have allocated."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _taken_over(address: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Bytes(address, num_bytes), device=device)


def device_view(device: torch.device, pinned: Tensor) -> Tensor:
    """A tensor in pinned memory as a tensor of the GPU, whose kernels read it where it lies.

    So it takes no copy, which would stand behind all others at the copy engine: those of a whole state, for example.
    """
    seen = _taken_over(pinned.data_ptr(), pinned.nbytes, device).view(pinned.dtype)
    assert seen.data_ptr() == pinned.data_ptr(), "it is the same memory"
    return seen


class CudaRegion:
    """A range of a GPU's addresses; torch must have made the GPU's context."""

    def __init__(self, device: torch.device, reserve: int) -> None:
        self._device = device
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(_DEVICE, device.index or 0)
        self._handles: list[ctypes.c_ulonglong] = []
        self._reserve = _rounded(reserve)
        base = ctypes.c_ulonglong()
        zero = ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(base), _size(self._reserve), _size(0), zero, zero)
        self.base = base.value
        self.size = 0

    def grow(self, num_bytes: int) -> int:
        """Take more into use."""
        start, more = self.size, _rounded(num_bytes)
        if start + more > self._reserve:
            raise torch.OutOfMemoryError(f"a region of {self._reserve} bytes is asked for {start + more}")
        self._back(start, more)
        self.size = start + more
        return start

    def bytes(self) -> Tensor:
        """What is in use."""
        return _taken_over(self.base, self.size, self._device)

    def clear(self) -> None:
        """Have nothing in use."""
        if self.size:
            self.unmap()
        self.size = 0

    def unmap(self) -> None:
        """Give the memory back to the device; nothing that is still to be done there may touch it."""
        self._call("cuMemUnmap", ctypes.c_ulonglong(self.base), _size(self.size))
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._handles.clear()

    def map(self) -> None:
        """Have memory behind all that is in use, in one piece."""
        self._back(0, self.size)

    def _back(self, start: int, num_bytes: int) -> None:
        handle = ctypes.c_ulonglong()
        properties = _Properties(kind=_PINNED, location=self._location)
        where = ctypes.c_ulonglong(self.base + start)
        zero = ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), _size(num_bytes), ctypes.byref(properties), zero)
        self._handles.append(handle)
        self._call("cuMemMap", where, _size(num_bytes), _size(0), handle, zero)
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", where, _size(num_bytes), ctypes.byref(access), _size(1))

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left")
        if code:
            raise RuntimeError(f"CUDA error: {name} failed with {code}")


class ScratchPool:
    """A pool for recordings whose memory comes from a region."""

    def __init__(self, region: CudaRegion) -> None:
        taking = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        leaving = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

        def take(num_bytes: int, _device: int, _stream: int | None) -> int | None:
            try:
                return region.base + region.grow(num_bytes)
            except RuntimeError:
                return None  # torch says what that means

        # Held for ever: torch keeps their addresses. Memory is never given back this way, but by the region itself.
        self._calls = taking(take), leaving(lambda *_: None)
        addresses = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls]
        self._pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*addresses))
        self.region = region

    @property
    def id(self) -> Any:
        """What a recording names it by."""
        return self._pool.id


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _CHUNK) * _CHUNK


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)
