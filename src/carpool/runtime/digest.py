"""One line that says whether two models are the same, bit for bit."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor, nn

from carpool.core.errors import InputError


def digest(model: nn.Module) -> str:
    """Sha256 over ``state_dict()`` sorted by key; buffers count, the optimizer does not.

    Each entry is its name, a zero byte, dtype (``float32``), shape (``(10, 64)``) and its bytes, contiguous and
    little-endian.
    """
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            raise InputError(f"{name!r} in the model's state_dict is a {type(value).__name__}, not a tensor")
        kind = str(value.dtype).removeprefix("torch.")
        total.update(f"{name}\0{kind}{tuple(value.shape)}".encode())
        total.update(tensor_bytes(value))
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor, contiguous and little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    if sys.byteorder == "big":
        width = flat.element_size() // (2 if flat.is_complex() else 1)
        raw = raw.view(-1, width).flip(1).contiguous().view(-1)
    return raw.numpy().data
