"""Entry for benchmarks: writes down when it was called, when the training was built, and when a step was done.

Times are of the machine's monotonic clock; the device has done the step by then. In between: when the host had launched
each part of the first step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import carpool
from carpool.runtime.worker.entry_loader import load_training

ENTRY = f"{Path(__file__).resolve()}:stamped"


_STATIONS = ("called", "entry", "arrival", "forward", "backward", "update", "device")
PARTS = tuple(f"{station}_s" for station in _STATIONS[1:])


def spans(out: Path, began: float) -> dict[str, float]:
    """Seconds from an instant to the call of the entry, to the end of the step, and of each part between them."""
    at = json.loads(out.read_text(encoding="ascii"))
    took = (at[end] - at[begin] for begin, end in pairwise(_STATIONS))
    return {
        "to_entry_s": at["called"] - began,
        **dict(zip(PARTS, took, strict=True)),
        "first_step_s": at["device"] - began,
    }


def stamped(
    entry: str,
    out: str,
    steps: int,
    args: Mapping[str, Any] | None = None,
    folder: str = "",
    step: int = 1,
    pause_s: float = 0.0,
) -> carpool.Training:
    """``out`` is the file that is written after step ``step``; ``pause_s`` is slept after every step."""
    at: dict[str, float] = {}

    def pass_by(station: str) -> None:
        at.setdefault(station, time.monotonic())  # the first time alone

    pass_by("called")
    training = load_training(entry, dict(args or {}), seed=0, folder=Path(folder) if folder else None)
    pass_by("entry")

    def loss(model: nn.Module, batch: Any) -> Any:
        pass_by("arrival")
        made = training.loss(model, batch)
        pass_by("forward")
        return made

    def after_update(model: nn.Module, done: int) -> None:
        pass_by("update")
        if done == step:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            pass_by("device")
            Path(out).write_text(json.dumps(at), encoding="ascii")
        if pause_s:
            time.sleep(pause_s)

    training.optimizer.register_step_pre_hook(lambda *_: pass_by("backward"))
    stop = carpool.Stop(steps=steps)
    return replace(training, loss=loss, stop=stop, evaluate=None, best="", schedule=None, after_update=after_update)
