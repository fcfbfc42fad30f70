"""An entry for benchmarks: its worker writes down when it was called, when the training was made, and when some step.

Instants are those of the machine's monotonic clock, which all processes share; the device has done the step by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import carpool
from carpool.runtime.entry import load_training

ENTRY = f"{Path(__file__).resolve()}:stamped"


def stamps(out: Path) -> tuple[float, float, float]:
    """When the entry was called, when the training was made, and when the step was done."""
    called, made, done = map(float, out.read_text(encoding="ascii").split())
    return called, made, done


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
    called = time.monotonic()
    training = load_training(entry, dict(args or {}), seed=0, folder=Path(folder) if folder else None)
    made = time.monotonic()

    def after_update(model: nn.Module, done: int) -> None:
        if done == step:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            Path(out).write_text(f"{called} {made} {time.monotonic()}", encoding="ascii")
        if pause_s:
            time.sleep(pause_s)

    stop = carpool.Stop(steps=steps)
    return replace(training, stop=stop, evaluate=None, best="", schedule=None, after_update=after_update)
