"""Training: the user's declaration of model, data, loss, optimizer and stop condition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from carpool.core.errors import InputError
from carpool.core.typed_fields import MAX_METRICS, printable, shown
from carpool.runtime.compat.torch_api import BatchNorm
from carpool.runtime.data.batches import Augment
from carpool.runtime.data.sample_stream import is_stream
from carpool.runtime.data.sampler import Shuffle
from carpool.runtime.data.tensor_rows import makes_batches
from carpool.runtime.engine.optimizer_set import Optimizers, combined, optimizers_of
from carpool.runtime.engine.stop_criteria import Best, Stop, as_whole

Loss = Callable[[nn.Module, Any], Any]  # the mean over the batch's samples, or (sum, count); metrics may follow
StepFunction = Callable[[nn.Module, Any, Any], Any]  # (model, batch, optimizer as given) -> loss; metrics may follow
Evaluate = Callable[[nn.Module], Any]  # one number, or names and numbers
AfterUpdate = Callable[[nn.Module, int], object]  # (model, steps done)
Schedules = LRScheduler | Sequence[LRScheduler]

PRECISIONS = ("", "float32", "tf32")
_MAX_NAME = 200  # characters of a metric's name
_AUTOCAST = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Report:
    """What a callback gets: the state of training after a step or an epoch."""

    step: int  # steps done
    epoch: int  # epochs done
    loss: float  # of this step; at the end of an epoch: the mean over its steps
    metrics: Mapping[str, float]  # of this step; at the end of an epoch, also those of `evaluate`
    model: nn.Module


Callback = Callable[[Report], object]


@dataclass(frozen=True, slots=True)
class Training:
    """A training job: model, data, loss or step, optimizer and stop condition.

    carpool owns device placement, batch splitting, checkpoints and preemption. An entry, a function named in the job
    file, returns a `Training`. Give either ``loss`` (carpool runs backward and the optimizers; captured as a CUDA graph
    where possible, on any number of devices) or ``step`` (your function does the whole step, on one device).

    Args:
        model: The module to train. Several networks: one module that holds them, such as ``nn.ModuleDict``.
        optimizer: One optimizer, or a list or dict of several, each with parameters of its own. With ``loss`` all of
            them step on the one gradient.
        dataset: A map-style dataset (`TensorDataset`, `Subset`, a list of samples, Hugging Face …), an object with
            ``batch(indices)``, or an `IterableDataset`.
        loss: ``loss(model, batch)`` returns the mean over the samples of the batch, or ``(sum, count)`` for a mean over
            something else (tokens, class weights). ``{name: tensor}`` may follow: ``(mean, metrics)`` or
            ``(sum, count, metrics)``. On several devices the metrics are those of the first one's samples.
        batch_size: Samples in one step, over all devices.
        stop: When training ends: ``Stop(epochs=20)``.
        step: ``step(model, batch, optimizer)`` makes a whole step (GAN, actor-critic, accumulation) and returns its
            loss, or ``(loss, metrics)``. It gets ``optimizer`` as given here. Runs on one device, in the order of
            ``loss``; scaling, clipping and autocast are its own.
        evaluate: ``evaluate(model)`` returns a number or ``{name: number}``; called in eval mode under ``no_grad``.
        evaluate_every: Epochs between evaluations; the final model is always evaluated.
        best: ``"max accuracy"`` or ``"min loss"``: the checkpoint of the best evaluation is kept with the last ones.
        schedule: A torch scheduler, or a list of several.
        schedule_every: Call ``schedule.step()`` after each ``"step"``, ``"epoch"`` or ``"evaluation"``.
        clip_norm: Maximum norm of the whole gradient.
        micro_batch: Most samples in one pass (gradient accumulation); 0 for no limit.
        autocast: ``"bf16"`` or ``"fp16"``; fp16 includes loss scaling.
        precision: Of float32 matmuls on a GPU, ``"float32"`` or ``"tf32"``; default: torch's setting.
        channels_last: Memory format of the model: faster on a GPU, different bits.
        state: EMA, replay buffer and other objects to checkpoint, by name; each has ``state_dict()`` and
            ``load_state_dict()``.
        after_update: ``after_update(model, steps_done)``, called after each update on every device, for example for an
            EMA. It may change weights.
        on_step_end: Called with a `Report` after each step, on the first device only. It must not change the model.
        on_epoch_end: Called with a `Report` after each epoch and its evaluation, on the first device only.
        augment: ``augment(batch, rng)`` returns the augmented batch.
        shuffle: True, False, or ``shuffle(seed, epoch)`` that returns sample indices. No effect on an
            `IterableDataset`.
        collate: Makes a batch of a list of samples; default: torch's ``default_collate``.
        workers: Reader processes for a map-style dataset; default: 2 on a GPU, 0 on a CPU. Datasets that only hold
            tensors need none.
    """

    model: nn.Module
    optimizer: Optimizers
    dataset: Any
    loss: Loss | None = None
    batch_size: int = 0
    stop: Stop = None  # type: ignore[assignment]  # checked below: `loss` before it is optional
    _: KW_ONLY
    step: StepFunction | None = None
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    best: str = ""
    schedule: Schedules | None = None
    schedule_every: Literal["step", "epoch", "evaluation"] = "step"
    clip_norm: float | None = None
    micro_batch: int = 0
    autocast: str | torch.dtype | None = None
    precision: str = ""
    channels_last: bool = False
    state: Mapping[str, Stateful] = field(default_factory=dict)
    after_update: AfterUpdate | None = None
    on_step_end: Callback | None = None
    on_epoch_end: Callback | None = None
    augment: Augment | None = None
    shuffle: bool | Shuffle = True
    collate: Callable[[list[Any]], Any] | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "evaluate_every", "micro_batch", "workers"):
            object.__setattr__(self, name, as_whole(getattr(self, name)))
        _check_types(self)
        _check_model(self)
        _check_data(self)
        _check_optimizers(self)
        _check_step(self)
        _check_schedule(self)
        _check_evaluation(self)
        _check_options(self)

    @property
    def num_samples(self) -> int:
        """The samples of an epoch; 0 if only iterating shows them."""
        return 0 if self.is_stream else len(self.dataset)

    @property
    def is_stream(self) -> bool:
        """Whether the dataset can only be iterated."""
        return is_stream(self.dataset)

    @property
    def whole_optimizer(self) -> torch.optim.Optimizer:
        """One optimizer that stands for all."""
        return combined(self.optimizer)

    @property
    def schedules(self) -> tuple[LRScheduler, ...]:
        if self.schedule is None:
            return ()
        return (self.schedule,) if isinstance(self.schedule, LRScheduler) else tuple(self.schedule)

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
        ("stop", Stop, "a carpool.Stop, for example Stop(epochs=20)"),
    )
    for name, kind, description in expected:
        value = getattr(training, name)
        if not isinstance(value, kind):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be {description}")
    for name in ("loss", "step", "evaluate", "augment", "after_update", "on_step_end", "on_epoch_end", "collate"):
        value = getattr(training, name)
        if value is not None and not callable(value):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be a function")
    if (training.loss is None) == (training.step is None):
        given = "neither" if training.loss is None else "both"
        raise InputError(
            f"Training has {given} of loss and step", way_out="Give one: loss=…, or step=… for a whole step."
        )
    _check_each("optimizer", training.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer, or several")
    if training.schedule is not None:
        _check_each("schedule", training.schedule, LRScheduler, "a torch LRScheduler, or a list of several")
    if not isinstance(training.shuffle, bool) and not callable(training.shuffle):
        raise InputError(f"Training(shuffle=…) is {_a(training.shuffle)}; it must be True, False or a function")


def _check_each(name: str, given: Any, kind: type, description: str) -> None:
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]
    for value in several or [None]:
        if not isinstance(value, kind):
            raise InputError(f"Training({name}=…) is {_a(value)}; it must be {description}")


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
    if not training.is_stream and not (
        hasattr(data, "__len__") and (makes_batches(data) or hasattr(data, "__getitem__"))
    ):
        raise InputError(
            f"Training(dataset=…) is {_a(data)}, which can neither be indexed nor iterated",
            way_out="Use a map-style dataset, with __len__ and __getitem__, or an IterableDataset.",
        )
    if training.is_stream and hasattr(data, "__next__"):
        raise InputError(
            f"Training(dataset=…) is {_a(data)}, an iterator that can be read only once",
            way_out="Use an IterableDataset, whose __iter__ starts again, or a map-style dataset.",
        )
    if type(batch_size) is not int or batch_size < 1:
        raise InputError(f"Training(batch_size={shown(batch_size)}); it must be a whole number of at least 1")
    if not training.is_stream and batch_size > len(data):
        raise InputError(
            f"batch_size is {shown(batch_size)}; the dataset has {len(data)} samples",
            way_out="Lower batch_size or use more data.",
        )
    if training.is_stream and callable(training.shuffle):
        raise InputError(
            f"shuffle is a function, but {type(data).__name__} has an order of its own",
            way_out="Shuffle in its __iter__: generators are seeded before every sample.",
        )


def _check_optimizers(training: Training) -> None:
    own = {id(parameter) for parameter in training.model.parameters()}
    seen: dict[int, str] = {}
    for optimizer in optimizers_of(training.optimizer):
        name = type(optimizer).__name__
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in own for parameter in held)
        if foreign:
            raise InputError(
                f"{foreign} of the {len(held)} parameters of {name} do not belong to the model",
                way_out="Create the optimizer from the parameters of the model given to Training.",
            )
        if not any(parameter.requires_grad for parameter in held):
            raise InputError(f"{name} holds no parameter that requires a gradient: there is nothing to train")
        if twice := [seen[id(parameter)] for parameter in held if id(parameter) in seen]:
            raise InputError(
                f"{name} and {twice[0]} share {len(twice)} parameters; each parameter belongs to one optimizer"
            )
        seen |= {id(parameter): name for parameter in held}
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if training.step is None and closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(
                f"{name}.step() needs a closure to evaluate the loss several times; carpool computes one gradient per "
                "step",
                way_out="Use an optimizer whose step() works without a closure, or write the step: Training(step=…).",
            )


def _check_step(training: Training) -> None:
    if training.step is None:
        return
    given = {"clip_norm": training.clip_norm, "autocast": training.autocast, "micro_batch": training.micro_batch}
    for name, value in given.items():
        if value:
            raise InputError(f"{name}={value!r} has no effect on step=…", way_out=f"Remove {name} and do it in step.")


def _check_schedule(training: Training) -> None:
    own = optimizers_of(training.optimizer)
    if any(not any(schedule.optimizer is each for each in own) for schedule in training.schedules):
        raise InputError("Training(schedule=…) was created for a different optimizer than Training(optimizer=…)")
    if training.schedule_every not in {"step", "epoch", "evaluation"}:
        raise InputError(f"schedule_every is {training.schedule_every!r}; it must be 'step', 'epoch' or 'evaluation'")
    plateau = any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in training.schedules)
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
    if type(training.evaluate_every) is not int or training.evaluate_every < 1:
        raise InputError(
            f"evaluate_every is {shown(training.evaluate_every)}; it must be a whole number of epochs from 1"
        )
    if training.best:
        Best.parse(training.best)
    elif training.stop.patience is not None:
        raise InputError(
            f"Stop(patience={training.stop.patience}) needs best=…, which is not given",
            way_out="Name the metric that must improve, for example best='max accuracy'.",
        )


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
    if type(training.micro_batch) is not int or training.micro_batch < 0:
        raise InputError(f"micro_batch is {training.micro_batch!r}; it must be a whole number of samples, or 0")
    if training.workers is not None and (type(training.workers) is not int or training.workers < 0):
        raise InputError(f"workers is {training.workers!r}; it must be a whole number of processes, or 0 for none")
    for name, thing in training.state.items():
        if not isinstance(thing, Stateful):
            raise InputError(
                f"state[{name!r}] is {_a(thing)} without state_dict() and load_state_dict(): it cannot be checkpointed"
            )


def _a(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def schedule_state(training: Training) -> Any:
    """The state of the schedule; a list for several."""
    states = [schedule.state_dict() for schedule in training.schedules]
    return states if len(states) > 1 else states[0] if states else None


def _one_line(name: str) -> str:
    return " ".join(printable(name).split())


def as_metrics(result: Any, source: str = "evaluate") -> dict[str, float]:
    """Convert the metrics that a function returned to named floats; a single number is named ``metric``."""
    named = result if isinstance(result, Mapping) else {"metric": result}
    if len(named) > MAX_METRICS:
        raise InputError(f"{source} returned {len(named)} metrics; the limit is {MAX_METRICS}")
    metrics = {}
    for name, value in named.items():
        if len(str(name)) > _MAX_NAME:
            raise InputError(
                f"{source} returned a metric named {shown(name)}; names have at most {_MAX_NAME} characters"
            )
        try:
            metrics[_one_line(str(name))] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            what = "None" if value is None else shown(value) if isinstance(value, int) else _a(value)
            raise InputError(
                f"{source} returned {what}{shape} for {name!r}",
                way_out="Return one number, or a dict of names and numbers.",
            ) from error
    return metrics
