"""Optimizer step: loss scaling, gradient averaging and clipping, weight update.

The optimizer may update a subset of the parameters: every rank needs the whole gradient only for its norm, and the
weights are bitwise those of one process that updates all. Parameters are never split, because norms and matrix
optimizers need whole ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.data.nested import nested_tensors
from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, StepSums
from carpool.runtime.engine.optimizer_set import optimizers_of
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs.verification import optimizer_tensors

_LARGE = 1 << 17  # elements
# Optimizers that compute every element by itself: the number of threads does not change the bits.
_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
    }
)
# Not SGD: its fused kernel fails if a parameter gets its first gradient later than the others.
_FUSED: frozenset[type[torch.optim.Optimizer]] = frozenset({torch.optim.Adam, torch.optim.AdamW})


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scale for float16: halved on overflow (the step is skipped), doubled after `growth_interval` steps.

    Always a power of two, so that unscaling is exact (Micikevicius et al. 2018).
    """

    value: float = 2.0**16
    growth_tracker: int = 0  # steps since the last change
    growth_interval: int = 2000

    def update(self, *, finite: bool) -> None:
        self.growth_tracker = self.growth_tracker + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.growth_tracker == self.growth_interval:
            self.value *= 2
            self.growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "calm": self.growth_tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.growth_tracker = state["value"], state["calm"]


def normalize_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, *, fused: bool = False) -> None:
    """Set the one form of an optimizer that eager steps, CUDA graphs and the reference share.

    ``foreach`` on GPUs and for small parameters; for large ones on a CPU a loop over parameters is faster. On CUDA
    ``capturable`` with a tensor learning rate, so that a graph reads its current value; an optimizer that is not
    capturable (SGD) keeps a float, because reading a tensor would synchronize in every step. ``fused`` permits the
    fused CPU kernel of Adam, which takes a third of the time and rounds slightly differently.
    """
    for part in optimizers_of(optimizer):
        _normalize_one(part, device, fused=fused)


def _normalize_one(optimizer: torch.optim.Optimizer, device: torch.device, *, fused: bool) -> None:
    _move_state(optimizer)
    cuda = device.type == "cuda"
    for group in optimizer.param_groups:
        if "foreach" not in group:  # not one of torch's optimizers
            continue
        is_fused = fused and device.type == "cpu" and type(optimizer) in _FUSED and _can_fuse(group)
        group["foreach"] = not is_fused and (cuda or not _are_large(group["params"]))
        if "fused" in group:
            group["fused"] = is_fused or None
        is_capturable = "capturable" in group
        if is_capturable:
            group["capturable"] = cuda
            for state in [optimizer.state[p] for p in group["params"] if p in optimizer.state]:
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(device)
        if cuda and is_capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        elif isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].item()


def _can_fuse(group: Mapping[str, Any]) -> bool:
    """Whether the parameters are what fused kernels assume: contiguous and float32 or float64."""
    dtypes = {torch.float32, torch.float64}
    is_plain = all(parameter.dtype in dtypes and parameter.is_contiguous() for parameter in group["params"])
    return is_plain and not group["differentiable"]


def _are_large(parameters: Sequence[Tensor]) -> bool:
    """Whether most elements are in parameters too large for the cache.

    Those are updated faster one by one, small ones by ``foreach``: `benchmarks/runtime_overhead.py` measures both.
    """
    large = sum(parameter.numel() for parameter in parameters if parameter.numel() > _LARGE)
    return 2 * large > sum(parameter.numel() for parameter in parameters)


@torch.no_grad()
def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's state to the device and memory format of its parameters.

    State created in the constructor (Adagrad) did not move with the model; loaded state is contiguous, and beside
    channels-last weights torch would update tensor by tensor. ``step`` is left to `normalize_optimizer`.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or name == "step":
                continue
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                like = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                state[name] = like.copy_(value)
            elif value.device != parameter.device:
                state[name] = value.to(parameter.device)


def _copy_into_old(new: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Copy loaded tensors into the previous ones where shape, stride, dtype and device are equal."""
    for name, value in new.items():
        target = old.get(name)
        if isinstance(value, Tensor) and isinstance(target, Tensor) and _format(target) == _format(value):
            new[name] = target.copy_(value)


def _format(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class OptimizerStep:
    """Applies a step's gradient to the model."""

    def __init__(self, training: Training, layout: FlatLayout, scale: LossScale | None) -> None:
        self.optimizer = training.whole_optimizer
        self._clip_norm = training.clip_norm
        self._layout = layout
        self._scale = scale
        self._is_elementwise = all(type(each) in _ELEMENTWISE for each in optimizers_of(self.optimizer))
        self._is_fused = False
        self.threads: int | None = None  # intra-op threads common to all ranks that update the same weights
        self.step_s = 0.0  # duration of the optimizer's last step
        self._on_launched: Callable[[], object] | None = None
        self._unused: dict[Tensor, dict[str, Any]] = {}  # state of captured graphs, see `load_state_dict`
        self.optimizer.register_step_post_hook(self._launched)

    def use_fused(self, fused: bool) -> None:
        if fused != self._is_fused:
            self._is_fused = fused
            self._normalize()

    def _normalize(self) -> None:
        normalize_optimizer(self.optimizer, self._layout.device, fused=self._is_fused)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], *, has_graphs: bool = False) -> bool:
        """Load a state into the existing tensors; returns whether all tensors are the same objects as before.

        Torch would replace them, and captured graphs with the old addresses would become invalid. With ``has_graphs``
        this holds for a state before the first step too: `reuse_state` is to be called after that step.
        """
        optimizer = self.optimizer
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        before = {parameter: dict(per_parameter) for parameter, per_parameter in optimizer.state.items()}
        before = before or self._unused
        self._unused = {}
        tensors = optimizer_tensors(optimizer)
        optimizer.load_state_dict(state)
        self._normalize()
        for group, old in zip(optimizer.param_groups, options, strict=True):
            _copy_into_old(group, old)
        for parameter, per_parameter in optimizer.state.items():
            _copy_into_old(per_parameter, before.get(parameter, {}))
        if has_graphs and before and not optimizer.state:
            self._unused = before
            return True
        return {id(tensor) for tensor in tensors} == {id(tensor) for tensor in optimizer_tensors(optimizer)}

    @property
    def creates_state(self) -> bool:
        """Whether the next step creates state that graphs have in other tensors: it must run eagerly."""
        return bool(self._unused)

    @torch.no_grad()
    def reuse_state(self) -> bool:
        """Move the state that the first step has created into the tensors of before; False if it differs in form."""
        unused, self._unused = self._unused, {}
        state = self.optimizer.state
        if state.keys() != unused.keys():
            return False
        for parameter, per_parameter in state.items():
            _copy_into_old(per_parameter, unused[parameter])
        reused = [tensor for each in unused.values() for tensor in nested_tensors(each)]
        return {id(tensor) for tensor in reused} == {id(tensor) for tensor in optimizer_tensors(self.optimizer)}

    @torch.no_grad()
    def load_gradients(self, total: Contribution, sums: StepSums) -> None:
        """Set the parameters' gradients from the step's sum: divided by the count, unscaled and clipped.

        With several ranks the norm is computed on one thread, the same in all of them. Any common number would do, but
        OpenMP ends the threads that a smaller number leaves over and starts them again for the next pass.
        """
        layout, values = self._layout, total.values
        if sums.counted or self._scale is not None or self._clip_norm is not None:
            values = values[: layout.gradients.stop].clone()
        if sums.counted:
            values.div_(total.values[layout.loss + 1])
        if self._scale is not None:
            values.mul_(1.0 / self._scale.value)
        for parameter, view, used in zip(layout.parameters, layout.gradient_views(values), sums.used, strict=True):
            if not used:
                parameter.grad = None
            elif parameter.is_complex():
                parameter.grad = torch.view_as_complex(view).to(parameter.dtype)
            else:
                parameter.grad = view.to(parameter.dtype)
        with intra_op_threads(None if self.threads is None else 1):
            self.clip()

    def clip(self) -> None:
        if self._clip_norm is None:
            return
        used = [parameter for parameter in self._layout.parameters if parameter.grad is not None]
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in used if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(used, self._clip_norm, norm)

    @torch.no_grad()
    def load_buffers(self, total: Contribution) -> None:
        """Copy the step's buffers into the model; a float buffer that no piece changed keeps its exact value."""
        layout = self._layout
        changed = total.values[layout.changed.start : layout.changed.stop] > 0
        views = layout.float_buffer_views(total.values)
        for ref, view, flag in zip(layout.float_buffers, views, changed, strict=True):
            buffer = ref.get()
            new = torch.view_as_complex(view) if buffer.is_complex() else view
            buffer.copy_(torch.where(flag, new.to(buffer.dtype), buffer))
        for ref, view in zip(layout.integer_buffers, layout.integer_buffer_views(total.integers), strict=True):
            ref.get().copy_(view)

    def apply(self, parameters: Collection[int] | None = None) -> None:
        """Step on some of the layout's parameters (default: all), then clear all gradients.

        Optimizers skip parameters without a gradient. One that may sum over elements uses the threads common to all
        ranks.
        """
        if parameters is not None:
            for index, parameter in enumerate(self._layout.parameters):
                if index not in parameters:
                    parameter.grad = None
        with intra_op_threads(None if self._is_elementwise else self.threads):
            self.step()
        self.clear_gradients()

    def clip_and_apply(self, on_launched: Callable[[], object] | None = None) -> None:
        """Clip and apply the gradients; ``on_launched`` is called right after the optimizer's last kernel launch."""
        self._on_launched = on_launched
        try:
            self.clip()
            self.apply()
        finally:
            self._on_launched = None

    def step(self) -> None:
        began = time.perf_counter()
        self.optimizer.step()
        self.step_s = time.perf_counter() - began

    def _launched(self, *_: object) -> None:
        # A post hook, because torch takes a while to return from the optimizer's step.
        if self._on_launched is not None:
            self._on_launched()

    def clear_gradients(self) -> None:
        for parameter in self._layout.parameters:
            parameter.grad = None
