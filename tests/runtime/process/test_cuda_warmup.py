"""Warm-up of a process without a job."""

from __future__ import annotations

import torch

from carpool.runtime.process.cuda_warmup import warm_up


def test_every_warm_up_training_runs() -> None:
    assert warm_up(torch.device("cpu")) == []
