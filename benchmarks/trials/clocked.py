"""Entry for benchmarks: any training, cut to a number of steps, whose workers write down when each step ended.

Times are written to one file per process, so that nothing between workers and benchmark is timed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import carpool

ENTRY = f"{Path(__file__).resolve()}:clocked"


def clocked(
    entry: str, notes: str, steps: int, args: Mapping[str, Any] | None = None, *, hashed: bool = False
) -> carpool.Training:
    """``entry`` is ``folder/file.py:function``; nothing is evaluated. ``hashed`` notes the digest of each step too."""
    path, _, function = entry.partition(":")
    file = Path(path)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    training: carpool.Training = getattr(import_module(file.stem), function)(**(args or {}))
    stop = carpool.Stop(steps=steps)
    training = replace(training, stop=stop, evaluate=None, best="", schedule=None)
    note = Clock(notes)
    if not hashed:  # a hook after updates would keep the shards of an exact job on one core
        return replace(training, schedule=Noting(training.optimizer, note), schedule_every="step")
    return replace(training, after_update=lambda model, step: note(step, carpool.digest(model)))


class Noting(LRScheduler):
    """A schedule that changes no learning rate and writes down when it was asked to."""

    def __init__(self, optimizer: Optimizer, note: Clock) -> None:
        self._note = note
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """As they are."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """An update was made."""
        super().step(epoch)
        if self.last_epoch:  # the first time is its own beginning
            self._note(self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """What has to be kept of it."""
        return {"last_epoch": self.last_epoch}


class Clock:
    """Writes down when a step of this process ended."""

    def __init__(self, notes: str) -> None:
        self._notes = notes

    def __call__(self, step: int, digest: str = "") -> None:
        """A step has just ended."""
        with Path(self._notes, str(os.getpid())).open("a", encoding="ascii") as file:
            file.write(f"{step} {time.monotonic_ns()} {digest}\n")


def ends(notes: Path) -> dict[int, float]:
    """For every step the second in which the last of its workers ended it."""
    found: dict[int, float] = {}
    for file in notes.iterdir():
        for line in file.read_text(encoding="ascii").splitlines():
            step, at = line.split()[:2]
            found[int(step)] = max(found.get(int(step), 0.0), int(at) / 1e9)
    return found


def taken_s(notes: Path, after: int, steps: int) -> float:
    """Seconds from the end of step ``after`` to the end of step ``steps``."""
    found = ends(notes)
    return found[steps] - found[after]


def median_step_s(notes: Path, after: int) -> float:
    """The median step, of those after ``after``."""
    found = ends(notes)
    return statistics.median(found[step] - found[step - 1] for step in found if step > after and step - 1 in found)


def learned(notes: Path) -> dict[int, set[str]]:
    """For every step the digests that its workers noted: more than one means that they went apart."""
    found: dict[int, set[str]] = {}
    for file in notes.iterdir():
        for step, _, digest in (line.split() for line in file.read_text(encoding="ascii").splitlines()):
            found.setdefault(int(step), set()).add(digest)
    return found
