"""A leak is told from a batch that never fitted."""

from __future__ import annotations

import resource

import pytest
import torch

from carpool.runtime.memory import memory_usage
from carpool.runtime.memory.memory_usage import MemoryGrowth, current_memory, process_limit

CPU, MIB = torch.device("cpu"), 2**20


@pytest.mark.parametrize(
    ("steps", "held", "grew"),
    [
        (1342, [100, 3000], True),
        (4, [100, 149], False),  # warm caches
        (2, [3000], False),  # a batch too large from the start
        (0, [], False),
    ],
)
def test_growth_over_good_steps_is_a_leak(
    monkeypatch: pytest.MonkeyPatch, steps: int, held: list[int], grew: bool
) -> None:
    sizes = iter(held)
    monkeypatch.setattr(memory_usage, "current_memory", lambda device: next(sizes) * MIB)
    growth = MemoryGrowth(CPU)
    for _ in range(steps):
        growth.count_step()
    found = growth.description()
    assert bool(found) == grew
    assert not grew or all(fact in found for fact in ("100 MiB", "3000 MiB", f"after {steps}", "detach"))


def test_a_limit_of_the_process_is_named_for_a_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 << 30, resource.RLIM_INFINITY))
    assert "3 GiB of address space" in process_limit(CPU)
    assert process_limit(torch.device("cuda")) == ""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert process_limit(CPU) == ""


def test_memory_in_use_is_measured() -> None:
    before = current_memory(CPU)
    held = torch.ones(64 * MIB // 4)
    assert current_memory(CPU) - before > 32 * MIB
    assert held.numel()
