"""CUDA virtual memory: address ranges whose physical memory is mapped and unmapped.

A captured graph holds raw addresses. Unmapping gives memory back to the device; after mapping again the addresses are
the same, and the graph is valid as before. The content is lost.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from carpool.runtime.compat.cuda_driver import OUT_OF_MEMORY, CudaDriverError, call
from carpool.runtime.compat.torch_api import custom_pool

_CHUNK = 2 << 20  # bytes: the granularity of all NVIDIA GPUs with virtual memory management
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # cuda.h: CU_MEM_LOCATION_TYPE_…, CU_MEM_ALLOCATION_TYPE_…, CU_MEM_ACCESS_…


class Region(Protocol):
    """A reserved address range whose first `size` bytes are in use."""

    @property
    def size(self) -> int: ...

    def grow(self, num_bytes: int) -> int:
        """Map more memory after the part in use. Returns its offset."""

    def bytes(self) -> Tensor:
        """The part in use, as a tensor of bytes."""

    def clear(self) -> None:
        """Free the whole part in use; it must be mapped."""

    def unmap(self) -> None:
        """Give the memory back and keep the addresses."""

    def map(self) -> None:
        """Map memory, with undefined content, to the addresses in use."""


class HostRegion:
    """A region in host memory, for CPU devices; unmapped pages read as zeros."""

    def __init__(self, reserve: int = 1 << 30) -> None:
        self._pages = mmap.mmap(-1, reserve, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = 0

    def grow(self, num_bytes: int) -> int:
        start = self.size
        self.size = start + _rounded(num_bytes)
        if self.size > len(self._pages):
            raise MemoryError(f"a region of {len(self._pages)} bytes cannot grow to {self.size}")
        return start

    def bytes(self) -> Tensor:
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=self.size)

    def clear(self) -> None:
        self.unmap()
        self.size = 0

    def unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Do nothing: the kernel maps pages on access."""


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _ArrayInterface:
    """Memory that a GPU can access, in the form in which torch adopts it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _as_tensor(address: int, num_bytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_ArrayInterface(address, num_bytes), device=device)


def device_view(device: torch.device, pinned: Tensor) -> Tensor:
    """View a tensor in pinned memory as a tensor of the GPU, whose kernels then read host memory.

    A copy would queue behind all others at the copy engine, for example those of a whole state that is swapped in.
    """
    view = _as_tensor(pinned.data_ptr(), pinned.nbytes, device).view(pinned.dtype)
    assert view.data_ptr() == pinned.data_ptr(), "it is the same memory"
    return view


class CudaRegion:
    """A region of a GPU's addresses; torch must have created the GPU's context."""

    def __init__(self, device: torch.device, reserve: int) -> None:
        self._device = device
        self._location = _Location(_DEVICE, device.index or 0)
        self._handles: list[ctypes.c_ulonglong] = []
        self._reserve = _rounded(reserve)
        base, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        _call("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(self._reserve), ctypes.c_size_t(0), zero, zero)
        self.base = base.value
        self.size = 0

    def grow(self, num_bytes: int) -> int:
        start, more = self.size, _rounded(num_bytes)
        if start + more > self._reserve:
            raise torch.OutOfMemoryError(f"a region of {self._reserve} bytes cannot grow to {start + more}")
        self._map(start, more)
        self.size = start + more
        return start

    def bytes(self) -> Tensor:
        return _as_tensor(self.base, self.size, self._device)

    def clear(self) -> None:
        if self.size:
            self.unmap()
        self.size = 0

    def unmap(self) -> None:
        """Give the memory back; no pending work of the device may access it."""
        _call("cuMemUnmap", ctypes.c_ulonglong(self.base), ctypes.c_size_t(self.size))
        for handle in self._handles:
            _call("cuMemRelease", handle)
        self._handles.clear()

    def map(self) -> None:
        self._map(0, self.size)

    def _map(self, start: int, num_bytes: int) -> None:
        handle, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        properties = _Properties(type=_PINNED, location=self._location)
        address = ctypes.c_ulonglong(self.base + start)
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(num_bytes), ctypes.byref(properties), zero)
        self._handles.append(handle)
        _call("cuMemMap", address, ctypes.c_size_t(num_bytes), ctypes.c_size_t(0), handle, zero)
        access = _Access(self._location, _READ_WRITE)
        _call("cuMemSetAccess", address, ctypes.c_size_t(num_bytes), ctypes.byref(access), ctypes.c_size_t(1))


class ScratchPool:
    """A memory pool for CUDA graphs whose memory comes from a region."""

    def __init__(self, region: CudaRegion) -> None:
        allocator = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        deallocator = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

        def allocate(num_bytes: int, _device: int, _stream: int | None) -> int | None:
            try:
                return region.base + region.grow(num_bytes)
            except RuntimeError:
                return None  # torch raises its own error

        # torch keeps their addresses, so they must live as long as the pool. Only the region itself frees memory.
        self._callbacks = allocator(allocate), deallocator(lambda *_: None)
        self._pool = custom_pool(*(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._callbacks))

    @property
    def id(self) -> Any:
        return self._pool.id


def _call(name: str, *args: object) -> None:
    try:
        call(name, *args)
    except CudaDriverError as error:
        if error.code == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left") from error
        raise


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _CHUNK) * _CHUNK
