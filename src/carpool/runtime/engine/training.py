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
    """What can be carried through a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Training:
    """A training as it is declared; the system owns devices, batch split, checkpoints and switching.

    ``loss(model, batch)`` returns the mean over the samples of the batch, or ``(sum, count)`` where the mean is over
    something else (tokens, class weights): then the step's loss is Σ sums / Σ counts however the batch is cut.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any  # has batch(indices), or is a map-style dataset
    loss: Loss
    batch_size: int
    stop: Stop
    _: KW_ONLY
    evaluate: Evaluate | None = None  # called in eval mode without gradients; a number or {name: number}
    evaluate_every: int = 1  # epochs between evaluations; one more is made at the end
    best: str = ""  # "max accuracy": which evaluation's checkpoint is kept beside the last ones
    schedule: LRScheduler | None = None
    schedule_every: Literal["step", "epoch", "evaluation"] = "step"
    clip_norm: float | None = None  # largest norm of the whole gradient
    autocast: str | torch.dtype | None = None  # "bf16" or "fp16"; fp16 scales the loss by itself
    precision: str = ""  # of float32 products on a GPU: "float32" or "tf32"; by default torch's own choice
    channels_last: bool = False  # keep weights of 2-d convolutions channels last: faster on a GPU, other bits
    state: Mapping[str, Stateful] = field(default_factory=dict)  # EMA and the like, by name
    after_update: AfterUpdate | None = None  # called after each optimizer step, for example to advance an EMA
    augment: Augment | None = None  # (batch, chance) -> batch
    shuffle: bool | Shuffle = True  # or (seed, epoch) -> sample numbers
    collate: Callable[[list[Any]], Any] | None = None  # for map-style datasets
    workers: int | None = None  # processes that read a map-style dataset ahead; by default 2 on a GPU, none on a CPU

    def __post_init__(self) -> None:
        _check_types(self)
        _check_model(self)
        _check_data(self)
        _check_optimizer(self)
        _check_options(self)

    @property
    def num_samples(self) -> int:
        """Samples in the training data."""
        return len(self.dataset)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that matrix products are made in; ``None`` for the parameters' own."""
        return _AUTOCAST[self.autocast] if isinstance(self.autocast, str) else self.autocast

    @property
    def batch_norms(self) -> list[str]:
        """The layers that take statistics over the batch, by name (those in eval mode do not)."""
        return [
            name for name, module in self.model.named_modules() if isinstance(module, BatchNorm) and module.training
        ]


def _check_types(training: Training) -> None:
    wanted: tuple[tuple[str, type, str], ...] = (
        ("model", nn.Module, "a torch.nn.Module"),
        ("optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer"),
        ("stop", Stop, "a carpool.Stop, for example Stop(epochs=20)"),
    )
    for name, kind, words in wanted:
        value = getattr(training, name)
        if not isinstance(value, kind):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be {words}")
    for name in ("loss", "evaluate", "augment", "after_update", "collate"):
        value = getattr(training, name)
        if (value is not None or name == "loss") and not callable(value):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be a function")
    if training.schedule is not None and not isinstance(training.schedule, LRScheduler):
        raise InputError(f"Training(schedule=…) is {_a(training.schedule)}; it must be a torch LRScheduler")
    if not isinstance(training.shuffle, bool) and not callable(training.shuffle):
        raise InputError(f"Training(shuffle=…) is {_a(training.shuffle)}; it must be True, False or a function")


def _check_model(training: Training) -> None:
    """Refuse tensors that cannot be copied in place: every state and every mirror is."""
    model = training.model
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
                raise InputError(
                    f"{what} {name!r} of the model has no shape yet",
                    way_out="Pass one batch through the model before the optimizer is made.",
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else "sparse"
                raise InputError(
                    f"{what} {name!r} of the model is {kind}; states are copied as dense tensors",
                    way_out="Register its indices and values, and put it together in forward; or keep it outside the "
                    "model, if it never changes.",
                )


def _check_data(training: Training) -> None:
    data, batch_size = training.dataset, training.batch_size
    if not hasattr(data, "__len__") or not (hasattr(data, "batch") or hasattr(data, "__getitem__")):
        raise InputError(
            f"Training(dataset=…) is {_a(data)}, which has no length or cannot be indexed",
            way_out="Give a map-style dataset; data order must not depend on who reads it.",
        )
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"Training(batch_size={batch_size!r}); it must be a whole number of at least 1")
    if batch_size > len(data):
        raise InputError(
            f"batch_size is {batch_size}; the data holds {len(data)} samples",
            way_out="Lower batch_size or bring more data.",
        )


def _check_optimizer(training: Training) -> None:
    optimizer = training.optimizer
    name = type(optimizer).__name__
    own = {id(parameter) for parameter in training.model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in own for parameter in held)
    if strangers:
        raise InputError(
            f"{strangers} of the {len(held)} parameters of {name} are not the model's",
            way_out="Build the optimizer from the parameters of the very model given to Training.",
        )
    if not any(parameter.requires_grad for parameter in held):
        raise InputError(f"{name} holds no parameter that requires a gradient: nothing would be trained")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{name} evaluates the loss several times in a step; the step's gradient is made once, on several devices",
            way_out="Take an optimizer whose step() works without a closure.",
        )


def _check_options(training: Training) -> None:
    if training.schedule is not None and training.schedule.optimizer is not training.optimizer:
        raise InputError("Training(schedule=…) belongs to another optimizer than Training(optimizer=…)")
    if training.schedule_every not in {"step", "epoch", "evaluation"}:
        raise InputError(f"schedule_every is {training.schedule_every!r}; it must be 'step', 'epoch' or 'evaluation'")
    plateau = isinstance(training.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if plateau and (training.schedule_every != "evaluation" or not training.best):
        raise InputError(
            "ReduceLROnPlateau follows a metric",
            way_out="Set schedule_every='evaluation' and name the metric in best, for example best='min loss'.",
        )
    if training.clip_norm is not None and not training.clip_norm > 0:
        raise InputError(
            f"clip_norm is {training.clip_norm!r}; it must be positive", way_out="Leave it out not to clip."
        )
    if training.autocast is not None and training.autocast not in {*_AUTOCAST, *_AUTOCAST.values()}:
        raise InputError(f"autocast is {training.autocast!r}; it must be 'bf16' or 'fp16'")
    if training.precision not in PRECISIONS:
        raise InputError(
            f"precision is {training.precision!r}; it must be 'float32' or 'tf32'",
            way_out="Leave it out for torch's own choice; bf16 is autocast='bf16'.",
        )
    if training.evaluate is None:
        for name, value in (("best", training.best), ("target_metric", training.stop.target_metric)):
            if value:
                raise InputError(f"{name}={value!r} needs evaluate=…, which is not given")
        if training.schedule_every == "evaluation":
            raise InputError("schedule_every='evaluation' needs evaluate=…, which is not given")
    if training.workers is not None and (type(training.workers) is not int or training.workers < 0):
        raise InputError(f"workers is {training.workers!r}; it must be a whole number of processes, or 0 for none")
    if training.evaluate_every < 1:
        raise InputError(f"evaluate_every is {training.evaluate_every}; it must be at least 1 epoch")
    if training.best:
        Best.parse(training.best)
    for name, thing in training.state.items():
        if not isinstance(thing, Stateful):
            raise InputError(
                f"state[{name!r}] is {_a(thing)} without state_dict() and load_state_dict(), so it would not survive"
            )


def _a(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def as_metrics(result: Any) -> dict[str, float]:
    """What ``evaluate`` returned as names and numbers; a single number is called ``metric``."""
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
