"""Training: the user's declaration of model, data, loss, optimizer and stop condition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from carpool.core.errors import InputError
from carpool.runtime.compat.torch_api import BatchNorm
from carpool.runtime.data.batches import Augment
from carpool.runtime.data.sampler import Shuffle
from carpool.runtime.engine.stop_criteria import Best, Stop

Loss = Callable[[nn.Module, Any], Any]  # the mean over the batch's samples, or (sum, count)
Evaluate = Callable[[nn.Module], Any]  # one number, or names and numbers
AfterUpdate = Callable[[nn.Module, int], object]  # (model, steps done)

PRECISIONS = ("", "float32", "tf32")
_AUTOCAST = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Training:
    """A training job: model, data, loss, optimizer and stop condition.

    carpool owns device placement, batch splitting, checkpoints and preemption. ``loss(model, batch)`` returns the mean
    over the samples of the batch, or ``(sum, count)`` for a mean over something else (tokens, class weights): the
    step's loss is then Σ sums / Σ counts, however the batch is split.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any  # has batch(indices), or is a map-style dataset
    loss: Loss
    batch_size: int
    stop: Stop
    _: KW_ONLY
    evaluate: Evaluate | None = None  # called in eval mode under no_grad; returns a number or {name: number}
    evaluate_every: int = 1  # epochs between evaluations; the final model is always evaluated
    best: str = ""  # "max accuracy": the checkpoint of this evaluation is kept besides the last ones
    schedule: LRScheduler | None = None
    schedule_every: Literal["step", "epoch", "evaluation"] = "step"
    clip_norm: float | None = None  # maximum norm of the whole gradient
    autocast: str | torch.dtype | None = None  # "bf16" or "fp16"; fp16 includes loss scaling
    precision: str = ""  # of float32 matmuls on a GPU: "float32" or "tf32"; default: torch's setting
    channels_last: bool = False  # memory format of the model: faster on a GPU, different bits
    state: Mapping[str, Stateful] = field(default_factory=dict)  # EMA and other objects to checkpoint, by name
    after_update: AfterUpdate | None = None  # called after each optimizer step, for example to update an EMA
    augment: Augment | None = None  # (batch, rng) -> batch
    shuffle: bool | Shuffle = True  # or (seed, epoch) -> sample indices
    collate: Callable[[list[Any]], Any] | None = None  # for map-style datasets
    workers: int | None = None  # reader processes for a map-style dataset; default: 2 on a GPU, 0 on a CPU

    def __post_init__(self) -> None:
        _check_types(self)
        _check_model(self)
        _check_data(self)
        _check_optimizer(self)
        _check_schedule(self)
        _check_evaluation(self)
        _check_options(self)

    @property
    def num_samples(self) -> int:
        return len(self.dataset)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return _AUTOCAST[self.autocast] if isinstance(self.autocast, str) else self.autocast

    @property
    def batch_norms(self) -> list[str]:
        """Names of the BatchNorm layers in training mode."""
        return [
            name for name, module in self.model.named_modules() if isinstance(module, BatchNorm) and module.training
        ]


def _check_types(training: Training) -> None:
    expected: tuple[tuple[str, type, str], ...] = (
        ("model", nn.Module, "a torch.nn.Module"),
        ("optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer"),
        ("stop", Stop, "a carpool.Stop, for example Stop(epochs=20)"),
    )
    for name, kind, description in expected:
        value = getattr(training, name)
        if not isinstance(value, kind):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be {description}")
    for name in ("loss", "evaluate", "augment", "after_update", "collate"):
        value = getattr(training, name)
        if (value is not None or name == "loss") and not callable(value):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be a function")
    if training.schedule is not None and not isinstance(training.schedule, LRScheduler):
        raise InputError(f"Training(schedule=…) is {_a(training.schedule)}; it must be a torch LRScheduler")
    if not isinstance(training.shuffle, bool) and not callable(training.shuffle):
        raise InputError(f"Training(shuffle=…) is {_a(training.shuffle)}; it must be True, False or a function")


def _check_model(training: Training) -> None:
    """Reject tensors that cannot be copied in place, as checkpoints and mirrors are."""
    model = training.model
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
                raise InputError(
                    f"{what} {name!r} of the model has no shape yet",
                    way_out="Run one batch through the model before creating the optimizer.",
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else "sparse"
                raise InputError(
                    f"{what} {name!r} of the model is {kind}; only dense tensors can be checkpointed",
                    way_out="Register its indices and values and build the tensor in forward, or keep a constant "
                    "tensor outside the model.",
                )


def _check_data(training: Training) -> None:
    data, batch_size = training.dataset, training.batch_size
    if not hasattr(data, "__len__") or not (hasattr(data, "batch") or hasattr(data, "__getitem__")):
        raise InputError(
            f"Training(dataset=…) is {_a(data)}, which has no length or cannot be indexed",
            way_out="Use a map-style dataset: sample order must not depend on the number of devices.",
        )
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"Training(batch_size={batch_size!r}); it must be a whole number of at least 1")
    if batch_size > len(data):
        raise InputError(
            f"batch_size is {batch_size}; the dataset has {len(data)} samples",
            way_out="Lower batch_size or use more data.",
        )


def _check_optimizer(training: Training) -> None:
    optimizer = training.optimizer
    name = type(optimizer).__name__
    own = {id(parameter) for parameter in training.model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise InputError(
            f"{foreign} of the {len(held)} parameters of {name} do not belong to the model",
            way_out="Create the optimizer from the parameters of the model given to Training.",
        )
    if not any(parameter.requires_grad for parameter in held):
        raise InputError(f"{name} holds no parameter that requires a gradient: there is nothing to train")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{name}.step() needs a closure to evaluate the loss several times; carpool computes one gradient per step",
            way_out="Use an optimizer whose step() works without a closure.",
        )


def _check_schedule(training: Training) -> None:
    if training.schedule is not None and training.schedule.optimizer is not training.optimizer:
        raise InputError("Training(schedule=…) was created for a different optimizer than Training(optimizer=…)")
    if training.schedule_every not in {"step", "epoch", "evaluation"}:
        raise InputError(f"schedule_every is {training.schedule_every!r}; it must be 'step', 'epoch' or 'evaluation'")
    plateau = isinstance(training.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau and (training.schedule_every != "evaluation" or not training.best):
        raise InputError(
            "ReduceLROnPlateau needs a metric",
            way_out="Set schedule_every='evaluation' and name the metric in best, for example best='min loss'.",
        )


def _check_evaluation(training: Training) -> None:
    every = training.schedule_every if training.schedule_every == "evaluation" else ""
    needs = {"best": training.best, "target_metric": training.stop.target_metric, "schedule_every": every}
    for name, value in needs.items():
        if value and training.evaluate is None:
            raise InputError(f"{name}={value!r} needs evaluate=…, which is not given")
    if training.evaluate_every < 1:
        raise InputError(f"evaluate_every is {training.evaluate_every}; it must be at least 1 epoch")
    if training.best:
        Best.parse(training.best)


def _check_options(training: Training) -> None:
    if training.clip_norm is not None and not training.clip_norm > 0:
        raise InputError(
            f"clip_norm is {training.clip_norm!r}; it must be positive", way_out="Omit it to disable clipping."
        )
    if training.autocast is not None and training.autocast not in {*_AUTOCAST, *_AUTOCAST.values()}:
        raise InputError(f"autocast is {training.autocast!r}; it must be 'bf16' or 'fp16'")
    if training.precision not in PRECISIONS:
        raise InputError(
            f"precision is {training.precision!r}; it must be 'float32' or 'tf32'",
            way_out="Omit it for torch's default; for bf16 set autocast='bf16'.",
        )
    if training.workers is not None and (type(training.workers) is not int or training.workers < 0):
        raise InputError(f"workers is {training.workers!r}; it must be a whole number of processes, or 0 for none")
    for name, thing in training.state.items():
        if not isinstance(thing, Stateful):
            raise InputError(
                f"state[{name!r}] is {_a(thing)} without state_dict() and load_state_dict(): it cannot be checkpointed"
            )


def _a(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def as_metrics(result: Any) -> dict[str, float]:
    """Convert the result of ``evaluate`` to named floats; a single number is named ``metric``."""
    named = result if isinstance(result, Mapping) else {"metric": result}
    metrics = {}
    for name, value in named.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise InputError(
                f"evaluate returned {_a(value)}{shape} for {name!r}",
                way_out="Return one number, or a dict of names and numbers.",
            ) from error
    return metrics
