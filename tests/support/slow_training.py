"""A tiny training that takes its time and says every step it makes, for whoever is killed, claimed or watched."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from carpool.runtime.data.datasets import TensorData
from carpool.runtime.engine.stop_criteria import Stop
from carpool.runtime.engine.training import Training


def tiny(seed: int = 1, steps: int = 60, step_s: float = 0.01, *, norm: bool = False) -> Training:
    """Dropout and Adam: whatever is lost on the way shows in its weights.

    With BatchNorm (``norm``) in its buffers too; its sums depend on the number of threads, hence on the device.
    """

    def told(model: nn.Module, step: int) -> None:
        time.sleep(step_s)
        print("step", step, flush=True)  # noqa: T201 - its log is what is looked at

    chance = torch.Generator().manual_seed(seed)
    data = TensorData(torch.randn(64, 6, generator=chance), torch.randint(0, 3, (64,), generator=chance))
    middle = [nn.BatchNorm1d(16)] if norm else []
    model = nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=16,
        stop=Stop(steps=steps),
        after_update=told,
    )


def gated(seed: int, gate: str, steps: int = 6, at: int = 3) -> Training:
    """The same without pauses, but it waits after one of its steps until a file exists: nothing depends on speed."""
    training = tiny(seed, steps, 0.0)
    told = training.after_update
    assert told is not None

    def wait(model: nn.Module, step: int) -> None:
        told(model, step)
        while step == at and not Path(gate).exists():
            time.sleep(0.02)

    return replace(training, after_update=wait)
