"""Device state: a training's memory on its device, swapped out and in at the same addresses.

The state lies in one flat region: weights and buffers first, what the optimizer remembers behind them. Parked, it lies
in a pinned mirror on the host, and both regions, state and scratch, have no memory on the device. It comes back in two
copies on a stream of its own: the forward pass waits for the weights, the update for the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

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
_BITE = 32 << 20  # bytes: half a millisecond over PCIe


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Where a tensor of the state lies."""

    tensor: Tensor
    start: int

    def view(self, flat: Tensor) -> Tensor:
        size = self.tensor.numel() * self.tensor.element_size()
        typed = flat[self.start : self.start + size].view(self.tensor.dtype)
        return typed.as_strided(self.tensor.size(), self.tensor.stride(), typed.storage_offset())


class DeviceState:
    """The memory of one trainer."""

    def __init__(
        self,
        trainer: Trainer,
        state: Region,
        scratch: Region | None,
        beside_torch: Callable[[int], object] = lambda num_bytes: None,  # told what more, or less, is not torch's
    ) -> None:
        self._trainer = trainer
        self._beside_torch = beside_torch
        self._state = state
        self._scratch = scratch  # None: there are no recordings
        self._pieces: list[_Piece] = []
        self._weights = 0  # bytes of the first part
        self._flat: Tensor | None = None
        self._mirror: Tensor | None = None
        self._copies = _Copies(trainer.device)
        self._is_clean = False  # the mirror holds what the device holds
        self._reserved = 0  # bytes that torch held when it had given back what it only kept
        self.out_s, self.unmap_s, self.map_s, self.come_s = (deque[float](maxlen=1000) for _ in range(4))
        self.is_in = True  # the state
        self.has_scratch = True

    @property
    def is_settled(self) -> bool:
        """Whether the state lies in its region, so that it can be parked."""
        return bool(self._pieces)

    def settle(self) -> None:
        """Move the state into the region, once a step has been made; recordings are made anew."""
        model, optimizer = self._trainer.training.model, self._trainer.training.optimizer
        if self._pieces:
            return
        remembered = [tensor for tensor in optimizer_tensors(optimizer) if self._may_move(tensor)]
        first = [tensor for tensor in (*model.parameters(), *model.buffers()) if self._may_move(tensor)]
        pieces, end = _laid_out([*first, *remembered])
        self._weights = pieces[len(first)].start if remembered else end
        start = self._state.grow(end)
        assert start == 0, "the region is this training's alone"
        self._flat = self._state.bytes()
        with torch.no_grad():
            for piece in pieces:
                view = piece.view(self._flat)
                view.copy_(piece.tensor)
                piece.tensor.data = view
        self._pieces = pieces
        self._mirror = torch.empty(end, dtype=torch.uint8, pin_memory=self._flat.is_cuda)
        self._is_clean = False
        if self._trainer.graphs is not None:
            self._trainer.graphs.forget()
        if self._flat.is_cuda:
            torch.cuda.empty_cache()
        self._beside_torch(self._state.size)

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether a tensor fills its memory alone; any other stays where it is, and never parks."""
        twin = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        is_dense = twin.stride() == tensor.stride()  # preserved only where there are no holes and no overlaps
        return tensor.device == self._trainer.device and is_dense and tensor.numel() > 0

    def need(self) -> MemoryNeed:
        """What it takes on the device."""
        scratch = self._scratch.size if self._scratch is not None else 0
        return MemoryNeed(self._state.size, scratch, self._fixed(scratch))

    def _fixed(self, scratch: int) -> int:
        """What torch holds beside the regions; what it only keeps for later goes back first."""
        device = self._trainer.device
        if device.type != "cuda":
            return 0
        if torch.cuda.memory_reserved(device) > self._reserved:
            torch.cuda.empty_cache()
            self._reserved = torch.cuda.memory_reserved(device)
        return CUDA_CONTEXT_BYTES + max(0, self._reserved - scratch)

    def leave(self, *, wholly: bool) -> None:
        """Give the scratch back, and wholly the state too; all that was begun on the device must have ended."""
        began = time.perf_counter()
        goes = wholly and self.is_in and self._flat is not None and self._mirror is not None
        if goes and not self._is_clean:
            assert self._mirror is not None
            assert self._flat is not None
            self._mirror.copy_(self._flat[: self._mirror.numel()], non_blocking=True)
        if self._scratch is not None and self.has_scratch and self._scratch.size:
            self._scratch.unmap()
        self.has_scratch = False
        if goes:
            self._copies.await_all()
            copied = time.perf_counter()
            self._state.unmap()
            self.is_in, self._is_clean = False, True
            self.out_s.append(copied - began)
            self.unmap_s.append(time.perf_counter() - copied)

    def come_back(self, *, wholly: bool = True) -> None:
        """Have memory again, and begin to copy the state into it; wholly: scratch too."""
        began = time.perf_counter()
        comes = not self.is_in and self._flat is not None and self._mirror is not None
        if comes:
            assert self._flat is not None
            assert self._mirror is not None
            self._state.map()
            self.map_s.append(time.perf_counter() - began)
            self._copies.begin(self._flat, self._mirror, self._weights)
            self.is_in = True
        if wholly:
            if self._scratch is not None and not self.has_scratch and self._scratch.size:
                self._scratch.map()  # while the copies are on their way
            self.has_scratch = True
        if comes:
            self.come_s.append(time.perf_counter() - began)

    def story(self) -> str:
        """How it left and came, in words; nothing if it never did."""
        if not self.map_s:
            return ""
        times = (self.out_s, self.unmap_s, self.map_s, self.come_s)
        out, unmap, again, whole = (1e3 * median(each) for each in times)
        need = self.need()
        return (
            f"its state of {need.state / 1e6:.0f} MB ({self._weights / 1e6:.0f} of them weights, beside "
            f"{need.scratch / 1e6:.0f} MB of scratch and {need.fixed / 1e6:.0f} that stay) left the device "
            f"{len(self.out_s)} times; medians: {out:.2f} ms to copy it out, {unmap:.2f} ms to give its memory back, "
            f"{again:.2f} ms to have it again, {whole:.2f} ms with the scratch"
        )

    def unsettle(self) -> None:
        """Let the state lie anywhere again, so that another can take its place."""
        self.come_back()
        self.await_rest()
        with torch.no_grad():
            for piece in self._pieces:
                piece.tensor.data = piece.tensor.detach().clone()
        self._copies.await_all()
        self._pieces, self._flat, self._mirror = [], None, None
        self._beside_torch(-self._state.size)  # its copy is torch's again
        self._state.clear()

    def change(self) -> None:
        """The state is about to be changed."""
        self._is_clean = False

    def await_weights(self) -> None:
        """What the device is told from now on finds the weights in their place."""
        self._copies.await_weights()

    def await_rest(self) -> None:
        """What the device is told from now on finds all of the state in its place."""
        self._copies.await_rest()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Let the state be read, wherever it lies."""
        if self.is_in:
            self.await_rest()
            yield
            return
        assert self._mirror is not None
        assert self._flat is not None
        with torch.no_grad():
            for piece in self._pieces:
                piece.tensor.data = piece.view(self._mirror)
            try:
                yield
            finally:
                for piece in self._pieces:
                    piece.tensor.data = piece.view(self._flat)


class _Copies:
    """Copies from the host that run beside the device's other work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._awaits_weights = self._awaits_rest = False
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._weights_here = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._rest_here = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, flat: Tensor, mirror: Tensor, weights: int) -> None:
        """Copy a mirror's first bytes and then the others."""
        end = mirror.numel()
        if not self._is_cuda:
            flat[:end].copy_(mirror)
            return
        with torch.cuda.stream(self._stream):
            flat[:weights].copy_(mirror[:weights], non_blocking=True)
            self._weights_here.record(self._stream)
            # In pieces: else the forward pass's own small copies would stand behind all of it at the copy engine.
            for start in range(weights, end, _BITE):
                stop = min(end, start + _BITE)
                flat[start:stop].copy_(mirror[start:stop], non_blocking=True)
            self._rest_here.record(self._stream)
        self._awaits_weights = self._awaits_rest = True

    def await_weights(self) -> None:
        if self._awaits_weights:
            self._awaits_weights = False
            torch.cuda.current_stream(self._device).wait_event(self._weights_here)

    def await_rest(self) -> None:
        self.await_weights()
        if self._awaits_rest:
            self._awaits_rest = False
            torch.cuda.current_stream(self._device).wait_event(self._rest_here)

    def await_all(self) -> None:
        """Return when everything on the device has been done."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def device_state_of(trainer: Trainer, *, loosely: bool) -> DeviceState:
    """The residence of a trainer on its device, with the memory of its recordings; it must not have made any yet."""
    device = trainer.device
    if device.type != "cuda":
        return DeviceState(trainer, HostRegion(), None)
    reserve = torch.cuda.get_device_properties(device).total_memory
    state, limit = CudaRegion(device, reserve), partial(tighten_limit, device=device)
    if trainer.graphs is None or not has_custom_pools():
        return DeviceState(trainer, state, None, limit)
    scratch = CudaRegion(device, reserve)
    trainer.graphs = trainer.recorded_by(CudaGraphCapture(device, ScratchPool(scratch)), loosely=loosely)
    return DeviceState(trainer, state, scratch, limit)


def _laid_out(tensors: list[Tensor]) -> tuple[list[_Piece], int]:
    """Tensors one behind another, and where they end."""
    pieces, start = [], 0
    for tensor in tensors:
        pieces.append(_Piece(tensor, start))
        start += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return pieces, start
