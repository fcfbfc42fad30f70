"""The digest is a stable format that scripts compare."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch
from torch import nn

import carpool
from carpool.runtime.errors import CheckpointError
from carpool.runtime.state.digest import digest, fingerprint


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 0.0]]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("brain", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.ones(1), persistent=False)


def test_digest_format() -> None:
    expected = hashlib.sha256(
        b"brain\0bfloat16(2,)" + bytes([0x80, 0x3F, 0x00, 0x40])
        + b"count\0int64()" + struct.pack("<q", 7)
        + b"none\0float32(0, 3)"
        + b"weight\0float32(2, 2)" + struct.pack("<4f", 1.0, -2.0, 0.5, 0.0)
    )  # fmt: skip
    assert digest(Mixed()) == expected.hexdigest()
    assert carpool.digest(Mixed()) == digest(Mixed())


def test_digest_depends_on_bits_not_on_memory_format() -> None:
    model = Mixed()
    first = digest(model)
    model.weight.data = model.weight.data.t().contiguous().t()
    assert digest(model) == first
    model.weight.data[1, 1] = -0.0
    assert digest(model) != first


class Annealed(nn.Linear):
    def __init__(self, extra: object) -> None:
        super().__init__(1, 1)
        self.weight.data.fill_(1.0)
        assert self.bias is not None
        self.bias.data.fill_(0.0)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra


@pytest.mark.parametrize("hashed", [digest, fingerprint])
def test_extra_state_belongs_to_the_digest(hashed: Callable[[nn.Module], str]) -> None:
    one, same, other = (hashed(Annealed({"seen": n, "at": torch.ones(2)})) for n in (1, 1, 2))
    assert one == same != other
    assert hashed(Annealed({"seen": 1, "at": torch.zeros(2)})) != one


def test_extra_state_that_no_checkpoint_holds_is_refused() -> None:
    with pytest.raises(CheckpointError, match="_extra_state is a object; checkpoints hold tensors, numbers"):
        digest(Annealed(object()))


def test_digest_of_complex_and_bool() -> None:
    for dtype in (torch.complex64, torch.bool, torch.float64, torch.uint8, torch.float16):
        model = nn.Module()
        model.register_buffer("x", torch.ones(3, dtype=dtype))
        other = nn.Module()
        other.register_buffer("x", torch.zeros(3, dtype=dtype))
        assert digest(model) != digest(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8])
def test_a_fingerprint_changes_with_every_element_and_its_place(dtype: torch.dtype) -> None:
    def of(values: torch.Tensor, small: float = 1.0) -> str:
        model = nn.Module()
        model.register_buffer("large", values)
        model.register_buffer("small", torch.full((3,), small))
        return fingerprint(model)

    values = (torch.arange(1_300_001) % 7).to(dtype)
    changed, last, near, far = (values.clone() for _ in range(4))
    changed[123_456] = 9
    last[-1] = 9
    near[[0, 1]] = values[[1, 0]]
    far[[1, 1_200_000]] = values[[1_200_000, 1]]
    found = [of(each) for each in (values, changed, last, near, far)]
    assert len({*found, of(values, small=2.0)}) == 6
    assert of(values.clone()) == found[0]
    assert of(torch.cat((values[:1], values))[1:]) == found[0]  # at any offset in memory
