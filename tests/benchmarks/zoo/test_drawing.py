"""Large weights are the same whoever draws them."""

from __future__ import annotations

import os

import torch
from zoo.drawing import draw, draw_normal, normal, xavier

from carpool.runtime.engine.determinism import seed_entry

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


def test_many_tensors_are_drawn_at_once_each_its_own() -> None:
    def made() -> list[torch.Tensor]:
        seed_entry(0)
        first, second = (torch.nn.Parameter(torch.empty(300, 500)) for _ in range(2))
        draw([(first, xavier(first)), (second, normal(2.0))])
        return [first.detach(), second.detach()]

    uniform, wide = made()
    assert all(torch.equal(one, other) for one, other in zip((uniform, wide), made(), strict=True))
    bound = (6 / 800) ** 0.5
    assert 0.99 * bound < uniform.abs().max().item() <= bound
    assert abs(wide.std().item() - 2.0) < 0.02
    assert not torch.equal(uniform, wide)
