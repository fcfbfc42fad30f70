"""Shared fixtures: an event loop, and small trainings with BatchNorm, dropout, Adam and a last partial batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.determinism import seed_entry
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training

MakeTraining = Callable[..., Training]


@pytest.fixture(autouse=True)
def restore_torch_settings() -> Iterator[None]:
    """Reset torch's global settings; on a busy machine several threads would make tiny operations much slower."""
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop per file, so that its tests can share an executor."""
    event_loop = asyncio.new_event_loop()
    yield event_loop
    event_loop.run_until_complete(event_loop.shutdown_asyncgens())
    event_loop.close()


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch[0]), batch[1])


def make(**changes: Any) -> Training:
    """100 samples in batches of 36, so that the last batch of an epoch has 28."""
    seed_entry(0)
    num_samples, batch_norm = changes.pop("num_samples", 100), changes.pop("batch_norm", True)
    inputs, labels = torch.randn(num_samples, 6), torch.randint(0, 3, (num_samples,))
    seed_entry(changes.pop("seed", 0))
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    layers = [nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
    model: nn.Module = changes.pop("model", None) or nn.Sequential(*layers)
    optimizer = changes.pop("optimizer", lambda parameters: torch.optim.Adam(parameters, lr=0.01))(model.parameters())
    if "schedule" in changes:
        changes["schedule"] = changes["schedule"](optimizer)
    options: dict[str, Any] = {
        "dataset": TensorData(inputs, labels),
        "loss": mean_loss,
        "batch_size": 36,
        "stop": Stop(epochs=2),
    }
    return Training(model=model, optimizer=optimizer, **options | changes)


@pytest.fixture
def make_training() -> MakeTraining:
    """A training of 100 samples; every argument can be replaced by name."""
    return make
