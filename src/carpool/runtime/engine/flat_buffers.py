"""Flat buffers: gradients, buffers and loss of a step piece as one vector that any reducer can add."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from carpool.runtime.compat.torch_api import foreach_copy_, own_buffers
from carpool.runtime.errors import TrainingError


@torch.no_grad()
def copy_tensors(into: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    """Give tensors these contents, those of one type together.

    On a GPU torch copies a row of one type with a few kernels, and a row in which types are mixed one by one; in a
    recording each of those copies is a node of its own. Before types were told apart, recorded steps on an H200 took
    5 to 8 µs longer for each buffer (floats and counts of BatchNorm layers) than without the copy: 0.9 ms of 4.5 ms for
    a MobileNetV3.
    """
    for targets, sources in group_by_dtype(into, contents):
        foreach_copy_(targets, sources)


def group_by_dtype(into: Sequence[Tensor], contents: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Tensors and what goes into them, row by row of one type."""
    rows: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(into, contents, strict=True):
        targets, sources = rows.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return list(rows.values())


# The vector holds, one after another: the gradients; the float buffers (running statistics); for each float buffer
# whether it changed; for each parameter whether it got a gradient; and the loss with its count. Adding two such vectors
# adds two subtrees of the step. Each tensor begins at a multiple of 64 bytes and has the strides of its parameter, so
# that the views behave like gradients that torch allocated.


_ALIGN = 16  # elements


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What a subtree of the step contributes: a vector that adds up, and the integer buffers of its first piece."""

    values: Tensor
    integers: Tensor

    def __iadd__(self, right: Contribution) -> Contribution:
        """Add the subtree on the right; integer buffers stay those of the left."""
        self.values.add_(right.values)
        return self


class StepSums(NamedTuple):
    """What is read of the sum of all contributions, in one go: the moment a step waits for its device."""

    used: list[bool]  # the parameters that got a gradient
    loss: float
    finite: bool  # whether all gradients are finite numbers
    counted: bool  # the loss came as (sum, count), so that all still has to be divided by the count


class _Segment(NamedTuple):
    start: int
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.start)


class _Slot(NamedTuple):
    buffers: dict[str, Tensor | None]  # of its module
    key: str
    name: str

    def read(self) -> Tensor:
        buffer = self.buffers[self.key]
        if buffer is None:
            raise TrainingError(f"buffer {self.name!r} is gone; it was there when the training began")
        return buffer


class FlatLayout:
    """Where each gradient and buffer of a model lies in the flat vector.

    Parameters are those the optimizer holds and that require a gradient, in the model's order. Vectors are float32, or
    float64 where the model has a float64 tensor; half types widen without loss.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(n, p) for n, p in model.named_parameters() if id(p) in held and p.requires_grad]
        self.model = model
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.floats, self.whole = _buffer_slots(model)
        self.slots = (*self.floats, *self.whole)
        self._empty = _empty_slots(model)
        tensors = [*self.parameters, *[slot.read() for slot in self.floats]]
        wide = any(tensor.dtype in {torch.float64, torch.complex128} for tensor in tensors)
        self.dtype = torch.float64 if wide else torch.float32
        self.device = self.parameters[0].device

        self._segments, end = _segments(tensors)
        self.gradients = range(self._segments[len(self.parameters)].start if self.floats else end)
        self.changed = range(end, end + len(self.floats))
        self.used = range(self.changed.stop, self.changed.stop + len(self.parameters))
        self.loss = self.used.stop  # loss, count, and how many passes gave a count
        self.size = self.loss + 3
        self._whole_sizes = [slot.read().numel() for slot in self.whole]

    def new(self) -> Contribution:
        """A vector of zeros."""
        values = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        return Contribution(values, torch.zeros(sum(self._whole_sizes), dtype=torch.int64, device=self.device))

    def cleared(self, used: Contribution) -> Contribution:
        """A vector that was used before, its end zeros again: gradients and buffers are written over."""
        used.values[self.changed.start :].zero_()
        return used

    def gradient_views(self, values: Tensor) -> list[Tensor]:
        """Each parameter's gradient, as a view of the vector (complex ones as pairs of floats)."""
        return [segment.view(values) for segment in self._segments[: len(self.parameters)]]

    def buffer_views(self, values: Tensor) -> list[Tensor]:
        """Each float buffer, as a view of the vector."""
        return [segment.view(values) for segment in self._segments[len(self.parameters) :]]

    def whole_views(self, integers: Tensor) -> Iterator[Tensor]:
        """Each integer buffer, as a view of the vector of integers."""
        for slot, piece in zip(self.whole, torch.split(integers, self._whole_sizes), strict=True):
            yield piece.view(slot.read().shape)

    def sums(self, values: Tensor) -> StepSums:
        """Read the end of the vector, and whether its gradients are finite (an infinity or NaN survives summing)."""
        total = values[: self.gradients.stop].sum()
        *used, loss, count, counted, probe = torch.cat([values[self.used.start :], total[None]]).tolist()
        if counted:
            loss = loss / count if count else math.nan
        return StepSums([flag > 0 for flag in used], loss, math.isfinite(probe), counted > 0)

    def buffers(self) -> list[Tensor]:
        """The model's float buffers and then its integer ones, as they are."""
        return [slot.read() for slot in self.slots]

    def refuse_new_buffers(self) -> None:
        """Refuse a buffer that was empty at first and is not any more: no fresh model could take the state over."""
        for slot in self._empty:
            if slot.buffers.get(slot.key) is not None:
                raise TrainingError(
                    f"buffer {slot.name!r} was None when the training began, and a step has filled it: it would not "
                    "survive. Give it its shape when the model is made."
                )

    @torch.no_grad()
    def put_back(self, buffers: list[Tensor], contents: list[Tensor]) -> None:
        """Give the model these buffers with these contents again, even if it replaced them by others."""
        for slot, buffer in zip(self.slots, buffers, strict=True):
            slot.buffers[slot.key] = buffer
        copy_tensors(buffers, contents)


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of floats, any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _buffer_slots(model: nn.Module) -> tuple[list[_Slot], list[_Slot]]:
    floats: list[_Slot] = []
    whole: list[_Slot] = []
    seen = set()
    for prefix, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            slot = _Slot(own_buffers(module), key, f"{prefix}.{key}" if prefix else key)
            (floats if buffer.is_floating_point() or buffer.is_complex() else whole).append(slot)
    return floats, whole


def _empty_slots(model: nn.Module) -> list[_Slot]:
    return [
        _Slot(own_buffers(module), key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, buffer in own_buffers(module).items()
        if buffer is None
    ]


def _segments(tensors: list[Tensor]) -> tuple[list[_Segment], int]:
    segments, start = [], 0
    for tensor in tensors:
        shape = real(tensor.detach())
        # Dense tensors keep their own strides (channels last, for example); for others, those of a fresh one.
        twin = torch.empty_like(shape, device="meta", memory_format=torch.preserve_format)
        segments.append(_Segment(start, twin.size(), twin.stride()))
        start += -(-twin.numel() // _ALIGN) * _ALIGN
    return segments, start
