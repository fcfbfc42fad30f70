"""Device state: a training's memory on its device, swapped out and in at the same addresses.

The state is one flat region: weights and buffers first, then the optimizer's state. Swapped out, it is in a pinned copy
on the host, and neither the state region nor the scratch region of captured graphs has device memory. It is swapped in
by two copies on a side stream: the forward pass waits for the weights, the update for the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import has_custom_pools
from carpool.runtime.compat.vmm import CudaRegion, HostRegion, Region, ScratchPool
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.graphs.capture import CudaGraphCapture
from carpool.runtime.graphs.verification import optimizer_tensors
from carpool.runtime.memory.eviction_policy import CUDA_CONTEXT_BYTES, MemoryNeed
from carpool.runtime.memory.memory_usage import tighten_limit

_ALIGN = 256  # bytes, as torch's own allocations
_COPY_CHUNK = 32 << 20  # bytes: half a millisecond over PCIe


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """A tensor and its offset in the region."""

    tensor: Tensor
    start: int

    def view(self, flat: Tensor) -> Tensor:
        size = self.tensor.numel() * self.tensor.element_size()
        typed = flat[self.start : self.start + size].view(self.tensor.dtype)
        return typed.as_strided(self.tensor.size(), self.tensor.stride(), typed.storage_offset())


class _StateBuffers(NamedTuple):
    device: Tensor
    host: Tensor  # pinned


class DeviceState:
    """The swappable memory of one trainer."""

    def __init__(
        self,
        trainer: Trainer,
        state: Region,
        scratch: Region | None,
        # gets each change of the memory that torch does not count
        on_resize: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._trainer = trainer
        self._on_resize = on_resize
        self._state = state
        self._scratch = scratch  # None: no captured graphs
        self._segments: list[_Segment] = []
        self._weight_bytes = 0  # at the start of the region
        self._buffers: _StateBuffers | None = None
        self._copies = _Copies(trainer.device)
        self._is_clean = False  # the host copy equals the device's state
        self._reserved = 0  # bytes that torch held after its cache was emptied
        self.copy_out_s, self.unmap_s, self.map_s, self.swap_in_s = (deque[float](maxlen=1000) for _ in range(4))
        self.has_state = True
        self.has_scratch = True

    @property
    def is_in_region(self) -> bool:
        return bool(self._segments)

    def enter_region(self) -> None:
        """Move the state into the region, after the first step; graphs are captured again."""
        if self._segments:
            return
        model, optimizer = self._trainer.training.model, self._trainer.training.whole_optimizer
        optimizer_state = [tensor for tensor in optimizer_tensors(optimizer) if self._is_movable(tensor)]
        weights = [tensor for tensor in (*model.parameters(), *model.buffers()) if self._is_movable(tensor)]
        segments, end = _lay_out([*weights, *optimizer_state])
        self._weight_bytes = segments[len(weights)].start if optimizer_state else end
        start = self._state.grow(end)
        assert start == 0, "the region holds only this training"
        flat = self._state.bytes()
        with torch.no_grad():
            for segment in segments:
                view = segment.view(flat)
                view.copy_(segment.tensor)
                segment.tensor.data = view
        self._segments = segments
        self._buffers = _StateBuffers(flat, torch.empty(end, dtype=torch.uint8, pin_memory=flat.is_cuda))
        self._is_clean = False
        if self._trainer.graphs is not None:
            self._trainer.graphs.reset()
        if flat.is_cuda:
            torch.cuda.empty_cache()
        self._on_resize(self._state.size)

    def _is_movable(self, tensor: Tensor) -> bool:
        """Whether a tensor is dense; others stay in place and are never swapped."""
        like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        is_dense = like.stride() == tensor.stride()  # strides are preserved only without holes and overlaps
        return tensor.device == self._trainer.device and is_dense and tensor.numel() > 0

    def memory_need(self) -> MemoryNeed:
        scratch = self._scratch.size if self._scratch is not None else 0
        return MemoryNeed(self._state.size, scratch, self._fixed_bytes(scratch))

    def _fixed_bytes(self, scratch: int) -> int:
        """Memory that torch holds outside the regions, with its cache emptied."""
        device = self._trainer.device
        if device.type != "cuda":
            return 0
        if torch.cuda.memory_reserved(device) > self._reserved:
            torch.cuda.empty_cache()
            self._reserved = torch.cuda.memory_reserved(device)
        return CUDA_CONTEXT_BYTES + max(0, self._reserved - scratch)

    def swap_out(self, *, include_state: bool) -> None:
        """Free the scratch and perhaps the state; the device must be idle."""
        began = time.perf_counter()
        buffers = self._buffers if include_state and self.has_state else None
        if buffers is not None and not self._is_clean:
            buffers.host.copy_(buffers.device[: buffers.host.numel()], non_blocking=True)
        if self._scratch is not None and self.has_scratch and self._scratch.size:
            self._scratch.unmap()
        self.has_scratch = False
        if buffers is not None:
            self._copies.synchronize()
            copied = time.perf_counter()
            self._state.unmap()
            self.has_state, self._is_clean = False, True
            self.copy_out_s.append(copied - began)
            self.unmap_s.append(time.perf_counter() - copied)

    def swap_in(self, *, include_scratch: bool = True) -> None:
        began = time.perf_counter()
        buffers = None if self.has_state else self._buffers
        if buffers is not None:
            self._state.map()
            self.map_s.append(time.perf_counter() - began)
            self._copies.start(buffers.device, buffers.host, self._weight_bytes)
            self.has_state = True
        if include_scratch:
            if self._scratch is not None and not self.has_scratch and self._scratch.size:
                self._scratch.map()  # during the copies
            self.has_scratch = True
        if buffers is not None:
            self.swap_in_s.append(time.perf_counter() - began)

    def note(self) -> str:
        """Swap statistics for the job's story; "" if the state was never swapped."""
        if not self.map_s:
            return ""
        times = (self.copy_out_s, self.unmap_s, self.map_s, self.swap_in_s)
        copy_out, unmap, map_again, swap_in = (1e3 * median(each) for each in times)
        need = self.memory_need()
        return (
            f"state swapped out {len(self.copy_out_s)} times: {need.state / 1e6:.0f} MB "
            f"({self._weight_bytes / 1e6:.0f} MB of them weights), with {need.scratch / 1e6:.0f} MB of scratch; "
            f"{need.fixed / 1e6:.0f} MB stayed; medians: copy out {copy_out:.2f} ms, unmap {unmap:.2f} ms, "
            f"map {map_again:.2f} ms, swap in {swap_in:.2f} ms"
        )

    def leave_region(self) -> None:
        """Move the state out of the region, so that another state can be loaded."""
        self.swap_in()
        self.await_state()
        with torch.no_grad():
            for segment in self._segments:
                segment.tensor.data = segment.tensor.detach().clone()
        self._copies.synchronize()
        self._segments, self._buffers = [], None
        self._on_resize(-self._state.size)  # torch counts the clones
        self._state.clear()

    def mark_dirty(self) -> None:
        """Mark the host copy as stale: the state is about to change."""
        self._is_clean = False

    def await_weights(self) -> None:
        """Make following kernels wait for the weights."""
        self._copies.await_weights()

    def await_state(self) -> None:
        """Make following kernels wait for the whole state."""
        self._copies.await_rest()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Let the state be read within the context, on the device or from its host copy."""
        if self.has_state:
            self.await_state()
            yield
            return
        buffers = self._buffers
        assert buffers is not None, "a state that was swapped out has a host copy"
        with torch.no_grad():
            for segment in self._segments:
                segment.tensor.data = segment.view(buffers.host)
            try:
                yield
            finally:
                for segment in self._segments:
                    segment.tensor.data = segment.view(buffers.device)


class _Copies:
    """Copies from the host on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._weights_pending = self._rest_pending = False
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._weights_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._rest_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, device: Tensor, host: Tensor, weight_bytes: int) -> None:
        end = host.numel()
        if not self._is_cuda:
            device[:end].copy_(host)
            return
        with torch.cuda.stream(self._stream):
            device[:weight_bytes].copy_(host[:weight_bytes], non_blocking=True)
            self._weights_copied.record(self._stream)
            # In chunks: otherwise the forward pass's small copies would queue behind one large copy at the copy engine.
            for start in range(weight_bytes, end, _COPY_CHUNK):
                stop = min(end, start + _COPY_CHUNK)
                device[start:stop].copy_(host[start:stop], non_blocking=True)
            self._rest_copied.record(self._stream)
        self._weights_pending = self._rest_pending = True

    def await_weights(self) -> None:
        if self._weights_pending:
            self._weights_pending = False
            torch.cuda.current_stream(self._device).wait_event(self._weights_copied)

    def await_rest(self) -> None:
        self.await_weights()
        if self._rest_pending:
            self._rest_pending = False
            torch.cuda.current_stream(self._device).wait_event(self._rest_copied)

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def new_device_state(trainer: Trainer, *, tolerant: bool) -> DeviceState:
    """Make a trainer's state swappable, with the memory of its graphs; none may be captured yet."""
    device = trainer.device
    if device.type != "cuda":
        return DeviceState(trainer, HostRegion(), None)
    reserve = torch.cuda.get_device_properties(device).total_memory
    if trainer.function_graph is not None:
        trainer.function_graph.disable("its state is moved to host memory (memory_cap)")
    state, on_resize = CudaRegion(device, reserve), partial(tighten_limit, device=device)
    if trainer.graphs is None or not has_custom_pools():
        return DeviceState(trainer, state, None, on_resize)
    scratch = CudaRegion(device, reserve)
    trainer.graphs = trainer.new_graphs(CudaGraphCapture(device, ScratchPool(scratch)), tolerant=tolerant)
    return DeviceState(trainer, state, scratch, on_resize)


def _lay_out(tensors: list[Tensor]) -> tuple[list[_Segment], int]:
    """Place tensors one after another; returns their segments and the total size."""
    segments, start = [], 0
    for tensor in tensors:
        segments.append(_Segment(tensor, start))
        start += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return segments, start
