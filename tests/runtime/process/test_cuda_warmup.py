"""What a warm seat tries out before its job is known."""

from __future__ import annotations

import torch

from carpool.runtime.process.cuda_warmup import warm_up


def test_every_tiny_training_can_be_made() -> None:
    assert warm_up(torch.device("cpu")) == []
