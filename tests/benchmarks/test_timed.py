"""Stamps of steps, and the losses beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def timed(trial: Callable[[str], ModuleType]) -> ModuleType:
    return trial("timed")


def test_a_step_that_was_made_twice_counts_once_with_its_later_loss(timed: ModuleType, tmp_path: Path) -> None:
    clock, cpu = timed.Clock(), torch.device("cpu")
    for losses, ends in (([1.0], 1), ([2.0, 3.0], 2), ([4.0], 1), ([5.0], 0)):  # the second proved, the last cut off
        for loss in losses:
            clock.stamp(timed.BEGIN, cpu)
            clock.note(torch.tensor(loss, requires_grad=True))
        for _ in range(ends):
            clock.stamp(timed.END, cpu)
    clock.write(tmp_path / "stamps")
    assert timed.read_losses(tmp_path / "stamps") == [1.0, 3.0, 4.0]
    steps = timed.read(tmp_path / "stamps")
    assert len(steps) == 3
    assert all(begin < end for begin, end in steps)
