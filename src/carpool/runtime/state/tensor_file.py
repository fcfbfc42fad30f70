"""Tensor file: plain values and tensors, checksummed, versioned and without code.

    "CARPOOL1", 8 bytes
    length of the header, 8 bytes, little-endian
    header: JSON {"schema", "tree", "tensors": [[dtype, shape, offset], …]}
    tensors: little-endian bytes, each at a multiple of 64
    sha256 of all before it, 32 bytes

Values without a JSON type are lists that start with their type: ``["tensor", 3]``, ``["tuple", […]]``. Pickle is not
used, because loading one can run any code.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carpool.runtime.errors import CheckpointError

SCHEMA = 1
_MAGIC = b"CARPOOL1"
_HEAD = struct.Struct("<8sQ")
_ALIGN = 64
_DIGEST_BYTES = 32
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


class StateParts(NamedTuple):
    """A value split into its header and the tensors whose bytes follow; only the tensors are live."""

    header: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any) -> StateParts:
        tensors: list[Tensor] = []
        tree = _encode(value, "", tensors)
        rows, offset = [], 0
        for tensor in tensors:
            rows.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            offset += _padded(tensor.numel() * tensor.element_size())
        header = json.dumps({"schema": SCHEMA, "tree": tree, "tensors": rows}).encode()
        return cls(header + b" " * (_padded(len(header) + _HEAD.size) - len(header) - _HEAD.size), tensors)

    def chunks_without_checksum(self) -> Iterator[bytes | memoryview]:
        yield from self._body()
        yield bytes(_DIGEST_BYTES)

    def chunks(self) -> Iterator[bytes | memoryview]:
        total = hashlib.sha256()
        for chunk in self._body():
            total.update(chunk)
            yield chunk
        yield total.digest()

    def _body(self) -> Iterator[bytes | memoryview]:
        yield _HEAD.pack(_MAGIC, len(self.header))
        yield self.header
        for tensor in self.tensors:
            raw = tensor_bytes(tensor)
            yield raw
            yield bytes(_padded(len(raw)) - len(raw))


def pack(value: Any) -> Iterator[bytes | memoryview]:
    """Encode a value as a file, in chunks."""
    return StateParts.of(value).chunks()


def unpack(content: bytes | bytearray | memoryview, where: str, *, checked: bool = True) -> Any:
    """Decode a file; ``where`` names it in errors."""
    if len(content) < _HEAD.size + _DIGEST_BYTES:
        raise CheckpointError(f"{where}: {len(content)} bytes, too short for a checkpoint; the file was truncated")
    view = memoryview(content)
    magic, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise CheckpointError(f"{where}: not a carpool checkpoint: starts with {magic!r}")
    body = view[:-_DIGEST_BYTES]
    if checked and hashlib.sha256(body).digest() != view[-_DIGEST_BYTES:]:
        raise CheckpointError(f"{where}: checksum mismatch; the file is damaged or truncated")
    header = json.loads(bytes(body[_HEAD.size : _HEAD.size + length]))
    if header["schema"] != SCHEMA:
        raise CheckpointError(
            f"{where}: written with schema {header['schema']}; this version of carpool reads {SCHEMA}. Update carpool."
        )
    data = body[_HEAD.size + length :]
    return _decode(header["tree"], [_tensor(row, data) for row in header["tensors"]])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, contiguous and little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    if sys.byteorder == "big":
        width = flat.element_size() // (2 if flat.is_complex() else 1)
        raw = raw.view(-1, width).flip(1).contiguous().view(-1)
    return raw.numpy().data


def _tensor(row: list[Any], data: memoryview) -> Tensor:
    name, shape, offset = row
    dtype = getattr(torch, name)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = bytearray(data[offset : offset + count * dtype.itemsize])
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _encode(value: Any, path: str, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors)
    if isinstance(value, np.ndarray):
        return ["array", _encode(torch.from_numpy(np.ascontiguousarray(value)), path, tensors)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Mapping):
        kind = type(value).__name__
        items = [[_encode(k, path, tensors), _encode(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return [kind if kind in _MAPPINGS else "dict", items]
    if isinstance(value, list | tuple | set | frozenset | deque):
        kind = type(value).__name__
        items = [_encode(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return [kind if kind in _SEQUENCES else "tuple" if isinstance(value, tuple) else "list", items]
    raise CheckpointError(
        f"{path.removeprefix('.') or 'the state'} is a {type(value).__name__}; checkpoints hold tensors, numbers, "
        "strings, lists and dicts. Return only those from state_dict()."
    )


def _decode(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return _decode(content, tensors).numpy()
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_decode(key, tensors): _decode(item, tensors) for key, item in content})
    return _SEQUENCES[kind]([_decode(item, tensors) for item in content])
