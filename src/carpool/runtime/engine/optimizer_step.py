"""Optimizer step: loss scaling, gradient averaging and clipping, weight update."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carpool.runtime.engine.determinism import intra_op_threads
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, StepSums
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs.verification import optimizer_tensors


@dataclass(slots=True)
class LossScale:
    """The factor on the loss: halved when a gradient overflows (that step is left out), doubled after a long calm.

    Always a power of two, so that scaling back is exact; the rule is that of Micikevicius et al. 2018.
    """

    value: float = 2.0**16
    calm: int = 0  # steps since it last changed
    patience: int = 2000

    def overflowed(self) -> None:
        """Take note of a gradient that is not finite."""
        self.value /= 2
        self.calm = 0

    def passed(self) -> None:
        """Take note of a step whose gradients were finite."""
        self.calm += 1
        if self.calm == self.patience:
            self.value *= 2
            self.calm = 0

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs."""
        return {"value": self.value, "calm": self.calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.value, self.calm = state["value"], state["calm"]


# The optimizer may step range by range: whoever updates a range of parameters needs the whole gradient only for its norm,
# and the weights come out bit for bit as if one process had updated them all. A range is whole parameters: the norm of a
# parameter, and optimizers that treat a parameter as a matrix, do not survive being cut.


_LARGE = 1 << 17  # elements
# Those that treat every element by itself: how their work is cut into threads does not show in the bits.
_BY_ELEMENT: frozenset[type[torch.optim.Optimizer]] = frozenset(
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
# SGD has a fused form too, which fails where a parameter gets its first gradient later than the others.
_FUSED: frozenset[type[torch.optim.Optimizer]] = frozenset({torch.optim.Adam, torch.optim.AdamW})


def normalize_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, *, fused: bool = False) -> None:
    """Bring an optimizer into the one form that the eager loop, graphs and the reference share.

    Many small operations instead of one fused kernel: each over all parameters (``foreach``), or, where these are large
    and on a CPU, parameter by parameter. On CUDA ``capturable`` with the learning rate in a tensor, so that a graph
    reads its present value. An optimizer that cannot be captured (SGD) keeps a number: it would read the tensor back in
    every step, and wait for the device to do so. Where ``fused`` kernels may be had on a CPU, Adam takes the one that
    torch has for it: it goes through memory once, in a third of the time, and rounds a little differently.
    """
    _gather_state(optimizer)
    cuda = device.type == "cuda"
    for group in optimizer.param_groups:
        if "foreach" not in group:  # an optimizer of another kind: it is left as it is
            continue
        is_fused = fused and device.type == "cpu" and type(optimizer) in _FUSED and _may_fuse(group)
        group["foreach"] = not is_fused and (cuda or not _are_large(group["params"]))
        if "fused" in group:
            group["fused"] = is_fused or None
        is_capturable = "capturable" in group
        if is_capturable:
            group["capturable"] = cuda
            for state in [optimizer.state[p] for p in group["params"] if p in optimizer.state]:
                if isinstance(state.get("step"), Tensor):  # counted where it is used; a loaded one may lie elsewhere
                    state["step"] = state["step"].to(device)
        if cuda and is_capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        elif isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].item()


def _may_fuse(group: Mapping[str, Any]) -> bool:
    """Whether a fused kernel, which takes every tensor for a plain row of numbers, may have these."""
    plain = {torch.float32, torch.float64}
    is_plain = all(parameter.dtype in plain and parameter.is_contiguous() for parameter in group["params"])
    return is_plain and not group["differentiable"]


def _keep_tensors(now: dict[str, Any], old: Mapping[str, Any]) -> None:
    """Have what was loaded in the tensors that were there before, where these are of its kind."""
    for name, new in now.items():
        place = old.get(name)
        if isinstance(new, Tensor) and isinstance(place, Tensor) and _kind(place) == _kind(new):
            now[name] = place.copy_(new)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _are_large(parameters: Sequence[Tensor]) -> bool:
    """Whether most elements lie in parameters that the next operation would not find in the cache any more.

    Such are updated quicker one by one, small ones by ``foreach``: `benchmarks/runtime_overhead.py` measures both.
    """
    large = sum(parameter.numel() for parameter in parameters if parameter.numel() > _LARGE)
    return 2 * large > sum(parameter.numel() for parameter in parameters)


@torch.no_grad()
def _gather_state(optimizer: torch.optim.Optimizer) -> None:
    """Bring what an optimizer remembers to where its parameters are now, and into their layout.

    What was made with the optimizer (Adagrad's sums) stayed behind when the model moved; what comes from a file or
    from another process is contiguous. Beside weights that are channels last torch would then update tensor by tensor,
    with hundreds of kernels in a step instead of a few. Only the count of steps stays: where it belongs depends on the
    optimizer's form.
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


class OptimizerStep:
    """Applies a step's gradient to the model."""

    def __init__(self, training: Training, layout: FlatLayout, scale: LossScale | None) -> None:
        self.optimizer = training.optimizer
        self._clip_norm = training.clip_norm
        self._layout = layout
        self._scale = scale
        self._is_by_element = type(training.optimizer) in _BY_ELEMENT
        self._is_fused = False
        self.threads: int | None = None  # that all ranks have, where several update the same weights
        self.step_s = 0.0  # that the optimizer's last step took
        self._then: Callable[[], object] | None = None
        self.optimizer.register_step_post_hook(self._stepped)

    def settle(self, *, fused: bool) -> None:
        """Let the optimizer have fused kernels, or not."""
        if fused != self._is_fused:
            self._is_fused = fused
            self.settle_anew()

    def settle_anew(self) -> None:
        """Bring the optimizer into its form again, after a state was loaded."""
        normalize_optimizer(self.optimizer, self._layout.device, fused=self._is_fused)

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> bool:
        """Load a state into the tensors that the optimizer remembers in already; whether it remembers in just these.

        Torch would replace them, and with their addresses every recording of a step would be void.
        """
        optimizer = self.optimizer
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        before = {parameter: dict(remembered) for parameter, remembered in optimizer.state.items()}
        held = optimizer_tensors(optimizer)
        optimizer.load_state_dict(state)
        self.settle_anew()
        for group, old in zip(optimizer.param_groups, settings, strict=True):
            _keep_tensors(group, old)
        for parameter, remembered in optimizer.state.items():
            _keep_tensors(remembered, before.get(parameter, {}))
        return {id(tensor) for tensor in held} == {id(tensor) for tensor in optimizer_tensors(optimizer)}

    @torch.no_grad()
    def load_gradients(self, total: Contribution, sums: StepSums) -> None:
        """Hang the step's gradient on the parameters, divided by its count and clipped.

        Where there are several ranks its norm is summed up on one thread, alike in all of them: any other number that
        all have would do, but OpenMP ends the threads that it leaves over, and begins them anew for the next pass.
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
        """Shorten the gradient that hangs on the parameters, where a largest norm is given."""
        if self._clip_norm is None:
            return
        used = [parameter for parameter in self._layout.parameters if parameter.grad is not None]
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in used if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(used, self._clip_norm, norm)

    @torch.no_grad()
    def load_buffers(self, total: Contribution) -> None:
        """Give the model the step's buffers; a float buffer that no piece changed stays as it is, unrounded."""
        layout = self._layout
        changed = total.values[layout.changed.start : layout.changed.stop] > 0
        views = layout.buffer_views(total.values)
        for slot, view, flag in zip(layout.floats, views, changed, strict=True):
            buffer = slot.read()
            new = torch.view_as_complex(view) if buffer.is_complex() else view
            buffer.copy_(torch.where(flag, new.to(buffer.dtype), buffer))
        for slot, view in zip(layout.whole, layout.whole_views(total.integers), strict=True):
            slot.read().copy_(view)

    def apply(self, parameters: Collection[int] | None = None) -> None:
        """Let the optimizer step on some of the layout's parameters, by default on all, and drop the gradient.

        An optimizer passes over a parameter without a gradient, so the others only have to lose theirs first. One that
        may sum anything up does so on as many threads as all ranks have.
        """
        if parameters is not None:
            for index, parameter in enumerate(self._layout.parameters):
                if index not in parameters:
                    parameter.grad = None
        with intra_op_threads(None if self._is_by_element else self.threads):
            self.step()
        self.drop_gradients()

    def make(self, then: Callable[[], object] | None = None) -> None:
        """Clip and apply the gradient that hangs on the parameters; call ``then`` behind the optimizer's last kernel.

        That is in a hook, since torch takes its time to leave the optimizer's step.
        """
        self._then = then
        try:
            self.clip()
            self.apply()
        finally:
            self._then = None

    def step(self) -> None:
        """Let the optimizer step on whatever has a gradient."""
        began = time.perf_counter()
        self.optimizer.step()
        self.step_s = time.perf_counter() - began

    def _stepped(self, *_: object) -> None:
        if self._then is not None:
            self._then()

    def drop_gradients(self) -> None:
        """Take the gradient off the parameters."""
        for parameter in self._layout.parameters:
            parameter.grad = None
