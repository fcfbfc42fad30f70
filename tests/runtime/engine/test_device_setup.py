"""Precision and memory format, set in the training or in its job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from carpool.jobs.program import Program
from carpool.runtime.engine.device_setup import place_training
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.process.worker_setup import with_program_options

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restore_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def tf32_allowed() -> tuple[bool, bool]:
    """Whether matmuls and convolutions may use TF32."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_precision_sets_tf32(make_training: Any) -> None:
    before = tf32_allowed()
    Trainer(make_training())
    assert tf32_allowed() == before
    Trainer(make_training(precision="tf32"))
    assert tf32_allowed() == (True, True)
    Trainer(make_training(precision="float32"))
    assert tf32_allowed() == (False, False)


def test_a_job_overrides_its_training(make_training: Any) -> None:
    assert with_program_options(make_training(precision="tf32"), Program()).precision == "tf32"
    assert with_program_options(make_training(precision="tf32"), Program(precision="float32")).precision == "float32"
    assert with_program_options(make_training(), Program(precision="bf16")).autocast_dtype is torch.bfloat16
    assert with_program_options(make_training(), Program(channels_last=True)).channels_last
    assert not with_program_options(make_training(), Program()).channels_last


def test_channels_last_weights_stay_in_the_optimizer(make_training: Any) -> None:
    conv = nn.Conv2d(6, 4, 3, padding=1)
    model = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), conv, nn.Flatten(), nn.Linear(4, 3))
    training = make_training(model=model, channels_last=True)
    place_training(training, CPU)
    weight = conv.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight is training.optimizer.param_groups[0]["params"][0]
