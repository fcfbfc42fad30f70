"""Entries for the tests' workers: small, with what can go wrong (BatchNorm, dropout, Adam, a last partial batch)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import carpool
from carpool.runtime.data.datasets import TensorData


def mlp(
    steps: int = 12,
    *,
    evaluated: bool = False,
    batch_norm: bool = True,
    breaks: str = "",
    clip_norm: float | None = None,
) -> carpool.Training:
    """100 samples, batches of 36, so that the last batch of an epoch holds 28."""
    inputs, labels = torch.randn(100, 6), torch.randint(0, 3, (100,))
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        dataset=TensorData(inputs, labels),
        loss=breaking(breaks) if breaks else mean_loss,
        batch_size=36,
        stop=carpool.Stop(steps=steps),
        evaluate=(lambda net: {"loss": cross_entropy(net(inputs), labels)}) if evaluated else None,
        best="min loss" if evaluated else "",
        clip_norm=clip_norm,
    )


def normalised(steps: int = 6) -> carpool.Training:
    """BatchNorm, and nothing that is drawn by chance in a pass: cut in any way it learns the same but for rounding."""
    inputs, labels = 1.0 + torch.randn(100, 6), torch.randint(0, 3, (100,))
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return carpool.Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        dataset=TensorData(inputs, labels),
        loss=mean_loss,
        batch_size=36,
        stop=carpool.Stop(steps=steps),
    )


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch[0]), batch[1])


def breaking(how: str) -> Callable[[nn.Module, Any], Any]:
    """A loss that is fine three times."""
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        value = mean_loss(model, batch)
        if calls <= 3:
            return value
        if how == "nan":
            return value * float("nan")
        if how == "exit":
            raise SystemExit("enough")
        raise ValueError("the moon is full")  # found by its line

    return loss


def refuses() -> carpool.Training:
    """Cannot be loaded."""
    raise LookupError("no data today")


class Unreadable(nn.Linear):
    def get_extra_state(self) -> Any:
        raise LookupError("no state today")


def has_no_state() -> carpool.Training:
    """Its model's state cannot be read."""
    model = Unreadable(6, 3)
    data = TensorData(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return carpool.Training(model, optimizer, data, mean_loss, batch_size=20, stop=carpool.Stop(steps=2))


def crashes() -> carpool.Training:
    """Takes the whole process down."""
    import ctypes

    ctypes.string_at(0)
    raise AssertionError("a null pointer can be read")


def loses_its_gpu(where: str) -> carpool.Training:
    """Meets, at some place, the error that a fault on a GPU shows as."""

    def meet(place: str) -> None:
        if place == where:
            raise RuntimeError("CUDA error: unspecified launch failure\nfor debugging consider many things")

    class Fickle:
        def state_dict(self) -> dict[str, int]:
            meet("save")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            meet("load")

    class Metric:
        def __float__(self) -> float:
            meet("evaluate")
            return 1.0

    meet("entry")
    made = mlp(steps=6)
    return dataclasses.replace(made, state={"fickle": Fickle()}, evaluate=lambda net: {"metric": Metric()})


def greedy() -> carpool.Training:
    """Runs out of memory while its weights are updated."""

    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise MemoryError

    made = mlp()
    return dataclasses.replace(made, optimizer=Greedy(made.model.parameters(), lr=0.1))


def counts_threads(notes: str) -> carpool.Training:
    """Writes down how many threads compute the loss, and how many the update and what follows it."""

    def note(what: str) -> None:
        with Path(notes, str(os.getpid())).open("a", encoding="ascii") as file:
            file.write(f"{what} {torch.get_num_threads()}\n")

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            note("update")
            return super().step(closure)

    def loss(model: nn.Module, batch: Any) -> Any:
        note("pass")
        return mean_loss(model, batch)

    made = mlp(steps=2)
    return dataclasses.replace(
        made,
        optimizer=Counting(made.model.parameters(), lr=0.1),
        loss=loss,
        after_update=lambda model, step: note("after"),
    )


def speaks() -> carpool.Training:
    """Has something to say."""
    print("good morning")  # noqa: T201
    return mlp()


def starts_another() -> carpool.Training:
    """Starts a process and does not look after it."""
    subprocess.Popen(["sleep", "600"])
    return mlp()
