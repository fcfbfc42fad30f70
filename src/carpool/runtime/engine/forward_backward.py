"""Forward and backward pass over one piece of a step: a shard (exact mode) or a device's part (default mode).

Both modes share one rule. The loss of a piece with n_s of the step's n samples is multiplied by n_s/n before backward,
so that the gradients of all pieces add up to the gradient of the step's mean. A loss given as (sum, count) is divided
by n before backward, and the total by Σ count / n afterwards. Every piece starts from the step's buffers; float buffers
are averaged with the weights n_s/n, integer buffers come from the first piece with samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import foreach_add_, foreach_copy_, foreach_mul_
from carpool.runtime.data.batches import BatchSource
from carpool.runtime.data.sample_stream import SampleStream
from carpool.runtime.data.sampler import Draw
from carpool.runtime.engine.determinism import seed_pass
from carpool.runtime.engine.early_gradients import EarlyGradients, GradientsReady
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, PendingLoss, as_real, differ
from carpool.runtime.engine.optimizer_step import LossScale
from carpool.runtime.engine.pass_guards import BufferSnapshot, MutationGuard
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import TrainingError
from carpool.runtime.reduce.shards import Bounds, Subtree, TreeAdder, is_empty, split_micro_batches

Contributions = list[tuple[Subtree, Contribution | None]]  # None: the subtree has no samples
ContributionSlots = Mapping[Subtree, Contribution]  # preallocated memory for subtrees
_NULL_CONTEXT = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One training step: its samples, and how they are split into pieces."""

    draw: Draw
    bounds: Bounds
    max_micro_batch: int = 0  # samples in one pass; 0: no limit

    @property
    def number(self) -> int:
        """Steps done before this one."""
        return self.draw.at.step

    @property
    def num_samples(self) -> int:
        return len(self.draw.samples)

    def micro_batches(self, piece: int) -> list[tuple[int, int]]:
        """Sample ranges of a piece: one, unless the piece does not fit into memory."""
        return split_micro_batches(*self.bounds[piece], self.max_micro_batch)

    def samples_in(self, pieces: range) -> int:
        return sum(end - start for start, end in (self.bounds[piece] for piece in pieces))

    def largest_micro_batch(self, pieces: range) -> int:
        return max((end - start for piece in pieces for start, end in self.micro_batches(piece)), default=0)


class LaunchObserver(Protocol):
    """Callbacks around the kernel launches of a step, for workers that take turns on a device."""

    def before_launch(self) -> None:
        """Block until kernels may be launched."""

    def after_launch(self) -> None:
        """Forward and backward are launched; the loss has not been read yet."""


class ForwardBackward:
    """Computes the contributions of pieces and leaves the model unchanged, so that a failed step can be repeated."""

    def __init__(
        self,
        training: Training,
        layout: FlatLayout,
        seed: int,
        scale: LossScale | None,
        stream: SampleStream | None = None,
    ) -> None:
        self._training = training
        self._layout = layout
        self._seed = seed
        self._scale = scale
        self._parameters = list(training.model.parameters())  # including those the optimizer does not hold
        self._snapshot = BufferSnapshot(layout)
        self._early = EarlyGradients(layout)
        self.mutation_guard = MutationGuard(training.model)
        self._autocast_dtype = training.autocast_dtype
        self._sparse_checked = False
        self.observer: LaunchObserver | None = None
        self.metrics: StepMetrics = {}  # that the loss of the last step returned
        self._metric_sums = MetricSums()
        self.batches = BatchSource(
            training.dataset,
            seed=seed,
            augment=training.augment,
            collate=training.collate,
            device=layout.device,
            workers=training.workers,
            stream=stream,
        )

    def contribute(
        self, step: Step, pieces: range, slots: ContributionSlots | None = None, ready: GradientsReady | None = None
    ) -> Contributions:
        """Sum a range of pieces in tree order into its maximal aligned subtrees.

        ``slots`` is the memory for each of these subtrees, so that no copy is needed. ``ready`` is called during the
        backward pass; it is for a single piece.
        """
        assert ready is None or len(pieces) == 1, f"{len(pieces)} pieces would be summed after the first was sent"
        self._snapshot.take()
        self._metric_sums = MetricSums()
        adder: TreeAdder[Contribution] = TreeAdder(add_contributions)
        free = {} if slots is None else {piece: slots[node] for node in slots for piece in node.shards}
        for piece in pieces:
            contribution = self._contribute_piece(step, piece, free.get(piece), ready)
            if contribution is not None and piece in free:  # a subtree is summed into the slot of its first piece
                free = {other: slot for other, slot in free.items() if slot is not free[piece]}
            adder.put(Subtree(0, piece), contribution)
        self.metrics = self._metric_sums.means()
        return adder.held

    def fetch_batch(self, step: Step) -> Any:
        return self.batches.fetch(step.draw.at.epoch, step.draw.samples, self._layout.device)

    def single_pass(self, batch: Any, number: int) -> float:
        """Run a step that is one piece; returns its loss and leaves gradients on the parameters.

        The result is bitwise that of `contribute`, without the flat vector. After an error or a non-finite loss the
        model is restored.
        """
        pending = self.launch_single_pass(batch, number)
        try:
            value = pending.value()
        except BaseException:
            self._restore()
            raise
        if not math.isfinite(value):
            self._restore()
        return value

    def launch_single_pass(self, batch: Any, number: int) -> PendingLoss:
        """Like `single_pass`, without waiting for the loss; the caller checks that it is finite."""
        self._snapshot.take()
        self.seed(number)
        self.clear_gradients()
        try:
            loss = self.forward(batch)
            pending = PendingLoss(loss)
            self.backward(loss)
            self._snapshot.check_shapes()
            self.after_launch()
        except BaseException:
            self._restore()
            raise
        return pending

    def before_launch(self) -> None:
        if self.observer is not None:
            self.observer.before_launch()

    def after_launch(self) -> None:
        self.batches.start_copy()
        if self.observer is not None:
            self.observer.after_launch()

    def seed(self, number: int) -> None:
        """Seed all generators for a step that is one piece."""
        seed_pass(self._seed, number, 0)

    def forward(self, batch: Any) -> Tensor:
        """The loss of a step that is one piece."""
        with self._autocast():
            loss, count, self.metrics = self._loss(batch)
            return loss if count is None else loss / count

    def _loss(self, batch: Any) -> LossParts:
        assert self._training.loss is not None, "a training with a step of its own has no loss"
        return read_loss(self._training.loss(self._training.model, batch))

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._sparse_checked:  # whether a layer makes sparse gradients does not change
            self._check_dense()
            self._sparse_checked = True

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._autocast_dtype
        return _NULL_CONTEXT if dtype is None else torch.autocast(self._layout.device.type, dtype=dtype)

    def _restore(self) -> None:
        self._snapshot.restore()
        self.clear_gradients()

    def _check_dense(self) -> None:
        for name, parameter in zip(self._layout.names, self._layout.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TrainingError(
                    f"the gradient of {name!r} is sparse; only dense gradients can be summed. Create the layer with "
                    "sparse=False."
                )

    def _contribute_piece(
        self, step: Step, piece: int, slot: Contribution | None, ready: GradientsReady | None
    ) -> Contribution | None:
        """The contribution of one piece, in ``slot`` or new memory; None for a piece without samples."""
        if is_empty(Subtree(0, piece), step.bounds):
            return None
        layout = self._layout
        contribution = layout.new() if slot is None else layout.reset(slot)
        micro_batches = step.micro_batches(piece)
        for number, (start, end) in enumerate(micro_batches):
            batch = self.batches.fetch(step.draw.at.epoch, step.draw.samples[start:end], layout.device)
            seed_pass(self._seed, step.number, piece, number)
            try:
                self.clear_gradients()
                early: AbstractContextManager[object] = _NULL_CONTEXT
                if ready is not None and number == len(micro_batches) - 1:
                    early = self._early.collecting(contribution, ready, accumulate=number > 0)
                with self.mutation_guard.watch() if len(step.bounds) > 1 else _NULL_CONTEXT, early:
                    self._weighted_backward(batch, end - start, step.num_samples, contribution.values)
                with torch.no_grad():
                    self._collect_gradients(contribution.values, accumulate=number > 0)
                    self._collect_buffers(contribution, (end - start) / step.num_samples, accumulate=number > 0)
            finally:
                self._early.forget()
                self._restore()
        return contribution

    def _weighted_backward(self, batch: Any, num_samples: int, of: int, values: Tensor) -> None:
        """Differentiate this micro-batch's part of the step's loss, and add the loss to the vector."""
        with self._autocast():
            loss, count, metrics = self._loss(batch)
            self._metric_sums.add(metrics, num_samples)
            if count is None:
                part = loss if num_samples == of else loss * (num_samples / of)
            else:
                part = loss / (count if num_samples == of else of)
        (part if self._scale is None else part * self._scale.value).backward()  # type: ignore[no-untyped-call]
        values[self._layout.loss] += part.detach()
        if count is not None and num_samples != of:
            values[self._layout.loss + 1] += count / of
            values[self._layout.loss + 2] += 1.0

    def _collect_gradients(self, values: Tensor, *, accumulate: bool) -> None:
        layout = self._layout
        self._check_dense()
        used = [parameter.grad is not None for parameter in layout.parameters]
        views, gradients = [], []
        for parameter, view, is_collected in zip(
            layout.parameters, layout.gradient_views(values), self._early.collected, strict=True
        ):
            if is_collected:
                continue
            if parameter.grad is not None:
                views.append(view)
                gradients.append(as_real(parameter.grad))
            elif not accumulate:
                view.zero_()
        if views:
            (foreach_add_ if accumulate else foreach_copy_)(views, gradients)
        values[layout.used.start : layout.used.stop] += torch.tensor(used, dtype=values.dtype).to(values.device)

    def _collect_buffers(self, contribution: Contribution, weight: float, *, accumulate: bool) -> None:
        layout = self._layout
        self._snapshot.check_shapes()
        buffers = layout.buffers()
        floats = buffers[: len(layout.float_buffers)]
        if floats:
            self._collect_float_buffers(contribution.values, floats, weight, accumulate=accumulate)
        if accumulate:
            return
        views = layout.integer_buffer_views(contribution.integers)
        for view, buffer in zip(views, buffers[len(floats) :], strict=True):
            view.copy_(buffer)

    def _collect_float_buffers(
        self, values: Tensor, floats: Sequence[Tensor], weight: float, *, accumulate: bool
    ) -> None:
        layout = self._layout
        views = layout.float_buffer_views(values)
        sources = [as_real(buffer) for buffer in floats]
        if accumulate:
            foreach_add_(views, sources, alpha=weight)
        else:
            foreach_copy_(views, sources)
        if weight == 1.0:
            values[layout.changed.start : layout.changed.stop] = 1.0
            return
        if not accumulate:
            foreach_mul_(views, weight)
        changed = [differ(buffer, old).any() for buffer, old in zip(floats, self._snapshot.contents, strict=False)]
        values[layout.changed.start : layout.changed.stop] += torch.stack(changed)


def add_contributions(left: Contribution, right: Contribution) -> Contribution:
    """Add the right subtree into the left one."""
    left += right
    return left


StepMetrics = Mapping[str, Any]  # name -> number or tensor of one element, read when they are reported


class LossParts(NamedTuple):
    """The result of ``loss``."""

    loss: Tensor  # a scalar
    num_counted: Tensor | float | None = None  # None: the loss is a mean over the samples
    metrics: StepMetrics = MappingProxyType({})


class MetricSums:
    """Averages the metrics of several passes, weighted by their samples, without reading them."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._num_samples = 0

    def add(self, metrics: StepMetrics, num_samples: int) -> None:
        self._num_samples += num_samples
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * num_samples

    def means(self) -> StepMetrics:
        return {name: total / self._num_samples for name, total in self._sums.items()}


def read_loss(result: Any) -> LossParts:
    """Split the result of ``loss`` into a scalar, for (sum, count) the count, and the metrics that may follow."""
    if isinstance(result, Tensor) and result.ndim == 0 and result.requires_grad:
        return LossParts(result)
    loss, count = result, None
    metrics: StepMetrics = {}
    way_out = "Return the mean over the batch's samples, or (sum, count); {name: tensor} may follow."
    if isinstance(result, tuple | list):
        values = list(result)
        if values and isinstance(values[-1], Mapping):
            metrics = detached(values.pop())
        if not 1 <= len(values) <= 2:
            raise TrainingError(f"loss returned {len(result)} values. {way_out}")
        loss = values[0]
        count = _read_count(values[1], way_out) if len(values) == 2 else None
    if not isinstance(loss, Tensor):
        raise TrainingError(f"loss returned a {type(loss).__name__}. {way_out}")
    if loss.numel() != 1:
        raise TrainingError(f"loss returned a tensor of shape {tuple(loss.shape)}. {way_out}")
    if not loss.requires_grad:
        raise TrainingError("loss returned a tensor that does not depend on the model's parameters; was it detached?")
    return LossParts(loss.reshape(()), count, metrics)


def _read_count(count: Any, way_out: str) -> Tensor | float:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise TrainingError(f"loss returned a count of shape {tuple(count.shape)}. {way_out}")
        return count.detach().reshape(())
    if isinstance(count, bool) or not isinstance(count, int | float):
        raise TrainingError(f"loss returned a count that is a {type(count).__name__}. {way_out}")
    return count


def detached(metrics: Mapping[str, Any]) -> StepMetrics:
    """Metrics without their autograd graphs."""
    return {str(name): value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
