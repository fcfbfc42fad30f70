"""Custom step: a training's own step function, its result, and the gradients that it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from carpool.core.errors import InputError
from carpool.runtime.engine.forward_backward import StepMetrics, detached
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import TrainingError


def check_custom_step(training: Training, *, exact: bool = False, devices: int = 1) -> None:
    """Reject settings that need a step that carpool can split."""
    if training.step is not None and (exact or devices > 1):
        asked = "exact = true" if exact else f"the job has {devices} devices"
        raise InputError(
            f"Training(step=…) cannot be split over shards or devices; {asked}",
            way_out="Set max_devices = 1 and leave exact out, or declare the step by loss=….",
        )


def read_step_result(result: Any) -> tuple[Tensor | float, StepMetrics]:
    """Split the result of a custom step into its loss and metrics."""
    loss = result
    metrics: StepMetrics = {}
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
        loss, metrics = result[0], detached(result[1])
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.detach().reshape(()), metrics
    if isinstance(loss, int | float) and not isinstance(loss, bool):
        return float(loss), metrics
    kind = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TrainingError(f"step returned a {kind}. Return the loss of the step, or (loss, metrics).")


def leftover_gradients(training: Training) -> dict[str, Any]:
    """The gradients that a custom step left, for the state: it may accumulate over several steps."""
    named = training.model.named_parameters() if training.step is not None else ()
    left = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    return {"gradients": left} if left else {}


def restore_gradients(training: Training, state: Mapping[str, Any]) -> None:
    """The inverse of `leftover_gradients`."""
    for name, parameter in training.model.named_parameters() if training.step is not None else ():
        gradient = state.get("gradients", {}).get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
