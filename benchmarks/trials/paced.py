"""Entry for benchmarks: any training of examples/, cut to a number of steps and slowed to a given pace.

A pause after each step (it changes no bit) lets faults, resizes and interrupts hit the middle of even a tiny training.
With ``record`` every step's gradient and the weights after it are written to a folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import carpool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def paced(
    example: str, args: Mapping[str, Any] | None = None, steps: int = 60, pause_s: float = 0.0, record: str = ""
) -> carpool.Training:
    """``example`` is ``file:function`` of examples/, without the ``.py``."""
    file, _, function = example.partition(":")
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    training: carpool.Training = getattr(import_module(file), function)(**(args or {}))
    gradients: list[torch.Tensor] = []

    def before_update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The step's gradient as the optimizer gets it, all parameters in a row."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        gradients[:] = [torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held])]

    def after_update(model: nn.Module, step: int) -> None:
        if record:
            part = Path(record) / f"{step}.{os.getpid()}.part"
            torch.save({"gradient": gradients[0], "model": model.state_dict()}, part)
            part.rename(Path(record) / f"{step}.pt")
        time.sleep(pause_s)

    if record:
        Path(record).mkdir(parents=True, exist_ok=True)
        training.optimizer.register_step_pre_hook(before_update)
    return replace(training, stop=carpool.Stop(steps=steps), after_update=after_update)
