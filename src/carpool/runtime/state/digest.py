"""Model digest: a hash that is equal for models whose state is bitwise equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from carpool.runtime.state.tensor_file import StateParts, tensor_bytes

_SMALL_BYTES = 1 << 20  # hashed directly
_COLUMNS = 4096


def digest(model: nn.Module) -> str:
    """Sha256 over ``state_dict()`` sorted by key: buffers included, the optimizer not.

    Each entry is its name, a zero byte, dtype (``float32``), shape (``(10, 64)``) and its contiguous little-endian
    bytes. Values of ``get_extra_state()`` count as a checkpoint holds them: a header, and the tensors in it.
    """
    total = hashlib.sha256()
    for name, value in _entries(model):
        total.update(_header(name, value))
        total.update(tensor_bytes(value))
    return total.hexdigest()


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Like `digest`, but over sums of large tensors: several times faster, and without a copy from the GPU.

    The bytes of a tensor are laid out as 64-bit integers in rows of 4096; the sums of rows and columns modulo 2⁶⁴ do
    not depend on the order of addition, and change if elements change or swap places. Not cryptographic.
    """
    total = hashlib.sha256()
    for name, value in _entries(model):
        total.update(_header(name, value))
        for piece in _sums(value) if value.nbytes > _SMALL_BYTES else (value,):
            total.update(tensor_bytes(piece))
    return total.hexdigest()


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _extra_entries(name, value)


def _extra_entries(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    parts = StateParts.of({name: value})
    yield name, torch.frombuffer(bytearray(parts.header), dtype=torch.uint8)
    for number, tensor in enumerate(parts.tensors):
        yield f"{name}[{number}]", tensor


def _header(name: str, value: Tensor) -> bytes:
    kind = str(value.dtype).removeprefix("torch.")
    return f"{name}\0{kind}{tuple(value.shape)}".encode()


def _sums(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Column sums, row sums and the remaining bytes."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    end = raw.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    table = raw[:end].view(torch.int64).view(-1, _COLUMNS)
    if table.is_cuda:
        return table.sum(0), table.sum(1), raw[end:]
    numbers = table.numpy()  # one NumPy thread is as fast as several torch threads here
    return torch.from_numpy(numbers.sum(0)), torch.from_numpy(numbers.sum(1)), raw[end:]
