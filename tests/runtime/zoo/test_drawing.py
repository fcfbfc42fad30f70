"""Large weights are the same whoever draws them."""

from __future__ import annotations

import os

import torch

from carpool.runtime.seeding import seed_entry
from carpool.runtime.zoo.drawing import draw_normal

_LARGE = (3, (3 << 20) + 7)  # more than two chunks, the last one not whole


def drawn(seed: int, size: tuple[int, ...] = _LARGE) -> torch.Tensor:
    seed_entry(seed)
    weight = torch.nn.Parameter(torch.empty(size))
    draw_normal(weight, 0.5)
    return weight.detach()


def test_the_number_of_cores_does_not_matter() -> None:
    cores = os.sched_getaffinity(0)
    wanted = drawn(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert torch.equal(drawn(0), wanted)
    finally:
        os.sched_setaffinity(0, cores)


def test_it_follows_from_the_seed_and_no_chunk_is_like_another() -> None:
    weight = drawn(0).view(-1)
    assert not torch.equal(weight, drawn(1).view(-1))
    assert not torch.equal(weight[: 1 << 22], weight[1 << 22 : 1 << 23])
    assert abs(weight.mean().item()) < 0.001
    assert abs(weight.std().item() - 0.5) < 0.001


def test_small_ones_are_drawn_as_torch_does() -> None:
    wanted = torch.empty(4, 5)
    seed_entry(3)
    torch.nn.init.normal_(wanted, 0.0, 0.5)
    assert torch.equal(drawn(3, (4, 5)), wanted)
