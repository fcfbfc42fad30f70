"""Private torch APIs: this torch has them all, and the fallbacks compute the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from carpool.runtime.compat import torch_api
from carpool.runtime.compat.torch_api import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parents[3]


def test_this_torch_has_every_private_api() -> None:
    assert [feature for feature in torch_api.features() if feature.problem] == []


def test_the_tested_versions_are_those_that_are_declared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (declared,) = (each for each in extras["torch"] if each.startswith("torch"))
    assert re.findall(r"\d+\.\d+", declared) == ["{}.{}".format(*OLDEST), f"{NEWEST[0]}.{NEWEST[1] + 1}"]


def test_a_missing_api_is_named_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_mul_")
    (missing,) = (feature for feature in torch_api.features() if feature.problem)
    assert "_foreach_mul_" in missing.problem
    assert missing.fallback


SOURCES = [torch.tensor([0.1, -2.0, 3.3]), torch.tensor([[1.7], [-0.2]])]


@pytest.mark.parametrize(
    ("fast", "slow", "operand", "options"),
    [
        (torch_api.foreach_copy_, torch_api._copy_each, SOURCES, {}),
        (torch_api.foreach_copy_, torch_api._copy_each, SOURCES, {"non_blocking": True}),
        (torch_api.foreach_add_, torch_api._add_each, SOURCES, {}),
        (torch_api.foreach_add_, torch_api._add_each, SOURCES, {"alpha": 0.3}),
        (torch_api.foreach_mul_, torch_api._multiply_each, 0.7, {}),
    ],
)
def test_fallbacks_of_foreach_operations_have_the_same_bits(
    fast: Callable[..., object], slow: Callable[..., object], operand: object, options: dict[str, Any]
) -> None:
    one, other = ([torch.linspace(-1.3, 2.1, each.numel()).view_as(each) for each in SOURCES] for _ in range(2))
    fast(one, operand, **options)
    slow(other, operand, **options)
    assert all(map(torch.equal, one, other))


def test_versions_count_changes_in_place() -> None:
    weight = nn.Linear(2, 2).weight.detach()
    (before,) = torch_api.versions([weight])
    weight.add_(1)
    assert torch_api.versions([weight]) == [before + 1]


def test_schedules_are_found_inside_others() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    assert torch_api.nested_schedules(torch.optim.lr_scheduler.ChainedScheduler(parts)) == parts
    assert torch_api.nested_schedules(parts[0]) == ()


def test_batch_norm_refuses_inputs_of_another_rank() -> None:
    with pytest.raises(ValueError, match="4D"):
        torch_api.check_batch_norm_input(nn.BatchNorm2d(3), torch.zeros(2, 3))
