"""Forward and backward pass over one piece of a step: a shard (exact mode) or a device's part (default).

Both modes share one rule. The loss of a piece with n_s of the step's n samples is multiplied by n_s/n before backward,
so that the gradients of all pieces add up to the gradient of the step's mean. A loss given as (sum, count) is divided
by n before backward, and the sum of all pieces by Σ count / n afterwards. Buffers start every piece from those of the
step; float buffers are averaged with the weights n_s/n, integer buffers come from the first piece that holds samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from carpool.runtime.compat.torch_api import foreach_add_, foreach_copy_, foreach_mul_
from carpool.runtime.data.batches import BatchSource
from carpool.runtime.data.sampler import Draw
from carpool.runtime.engine.determinism import seed_pass
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, real
from carpool.runtime.engine.optimizer_step import LossScale
from carpool.runtime.engine.pass_guards import BufferSnapshot, MutationGuard
from carpool.runtime.engine.training import Training
from carpool.runtime.errors import TrainingError
from carpool.runtime.reduce.shards import Bounds, Subtree, TreeAdder, cut_into_passes

Contributions = list[tuple[Subtree, Contribution | None]]  # subtrees with what they contribute; None: no samples
ContributionSlots = Mapping[Subtree, Contribution]  # where the contributions of subtrees are to lie
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step to be made: its samples, and how they are cut into pieces."""

    draw: Draw
    bounds: Bounds
    most: int = 0  # samples in a pass; 0: any number

    @property
    def number(self) -> int:
        """How many steps came before it."""
        return self.draw.at.step

    @property
    def num_samples(self) -> int:
        """Samples in the step."""
        return len(self.draw.samples)

    def is_empty(self, piece: int) -> bool:
        """Whether a piece holds no samples."""
        start, end = self.bounds[piece]
        return start == end

    def passes(self, piece: int) -> list[tuple[int, int]]:
        """The samples of a piece, pass by pass: one, unless they do not fit into memory together."""
        return cut_into_passes(*self.bounds[piece], self.most)

    def samples_in(self, pieces: range) -> int:
        """Samples in some pieces."""
        return sum(end - start for start, end in (self.bounds[piece] for piece in pieces))

    def longest(self, pieces: range) -> int:
        """Samples in the longest pass over some pieces."""
        return max((end - start for piece in pieces for start, end in self.passes(piece)), default=0)


class PassObserver(Protocol):
    """Who is told how far a pass has come."""

    def starts(self) -> None:
        """Nothing has been said to the device yet: return when it may be."""
        ...

    def is_queued(self) -> None:
        """The device has been told all of it and the loss is not known yet."""
        ...


class ForwardBackward:
    """Makes the contributions of pieces, and leaves the model as it was: a step that fails can be made again."""

    def __init__(self, training: Training, layout: FlatLayout, seed: int, scale: LossScale | None) -> None:
        self._training = training
        self._layout = layout
        self._seed = seed
        self._scale = scale
        self._parameters = list(training.model.parameters())  # frozen and foreign to the optimizer ones too
        self._before = BufferSnapshot(layout)
        self._untouched = MutationGuard(training.model)
        self._autocast_to = training.autocast_dtype
        self._has_passed = False
        self.turn: PassObserver | None = None  # who is told of the pass that is made; some things perhaps twice
        self.samples = BatchSource(
            training.dataset,
            seed=seed,
            augment=training.augment,
            collate=training.collate,
            device=layout.device,
            workers=training.workers,
        )

    def contribute(self, step: Step, pieces: range, places: ContributionSlots | None = None) -> Contributions:
        """The maximal aligned subtrees of a range of pieces, each added up in tree order.

        ``places`` has, for each of these subtrees, where its sum is to lie: then nothing has to be copied there.
        """
        self.begin()
        gather: TreeAdder[Contribution] = TreeAdder(add_contributions)
        free = {} if places is None else {piece: places[node] for node in places for piece in node.shards}
        for piece in pieces:
            made = self.piece(step, piece, free.get(piece))
            if made is not None and piece in free:  # a subtree is added up into the first of its pieces
                free = {other: place for other, place in free.items() if place is not free[piece]}
            gather.put(Subtree(0, piece), made)
        return gather.held

    def begin(self) -> None:
        """Remember the model as it is at the begin of a step: every piece starts from it."""
        self._before.take()

    def fetch(self, step: Step) -> Any:
        """All samples of a step, on the device."""
        return self.samples.fetch(step.draw.at.epoch, step.draw.samples, self._layout.device)

    def whole(self, batch: Any, number: int) -> float:
        """One pass over a step that is one piece: its loss; gradients stay on the parameters, buffers in the model.

        What comes out is bit for bit what `contribute` gives, without a vector in between: nobody else has to read it.
        After an error, or a loss that is no number, the model is as it was.
        """
        self._before.take()
        self.seed(number)
        self.clear()
        try:
            loss = self.forward(batch)
            reading = PendingLoss(loss)
            self.backward(loss)
            self._before.refuse_growth()
            self.queued()
            value = reading.value()
        except BaseException:
            self._undo()
            raise
        if not math.isfinite(value):
            self._undo()
        return value

    def starts(self) -> None:
        """A pass is about to be said to the device."""
        if self.turn is not None:
            self.turn.starts()

    def queued(self) -> None:
        """A pass has been said to the device: what is done while that is busy."""
        self.samples.send()
        if self.turn is not None:
            self.turn.is_queued()

    def seed(self, number: int) -> None:
        """Set all generators for the pass over a step that is one piece."""
        seed_pass(self._seed, number, 0)

    def forward(self, batch: Any) -> Tensor:
        """The loss of a step that is one piece."""
        with self._autocast():
            loss, count = read_loss(self._training.loss(self._training.model, batch))
            return loss if count is None else loss / count

    def backward(self, loss: Tensor) -> None:
        """Hang the gradient of the loss on the parameters."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._has_passed:  # which layers make sparse gradients does not change
            self._refuse_sparse()
            self._has_passed = True

    def gradients(self) -> list[Tensor | None]:
        """What hangs on the parameters."""
        return [parameter.grad for parameter in self._parameters]

    def hang(self, gradients: Sequence[Tensor | None]) -> None:
        """Hang gradients on the parameters again."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def clear(self) -> None:
        """Take all gradients off the parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = self._autocast_to
        return _NOTHING if dtype is None else torch.autocast(self._layout.device.type, dtype=dtype)

    def _undo(self) -> None:
        """Give the model its buffers back, and take the gradients off."""
        self._before.restore()
        self.clear()

    def _refuse_sparse(self) -> None:
        for name, parameter in zip(self._layout.names, self._layout.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TrainingError(
                    f"the gradient of {name!r} is sparse; gradients are added up as dense ones. Build the layer with "
                    "sparse=False."
                )

    def piece(self, step: Step, piece: int, place: Contribution | None = None) -> Contribution | None:
        """What one piece contributes, in a given place or in a new one; nothing, where it has no samples."""
        if step.is_empty(piece):
            return None
        layout = self._layout
        made = layout.new() if place is None else layout.cleared(place)
        for number, (first, stop) in enumerate(step.passes(piece)):
            batch = self.samples.fetch(step.draw.at.epoch, step.draw.samples[first:stop], layout.device)
            seed_pass(self._seed, step.number, piece, number)
            try:
                self.clear()
                with self._untouched.watching() if len(step.bounds) > 1 else _NOTHING:
                    self._backward(batch, stop - first, step.num_samples, made.values)
                with torch.no_grad():
                    self._take_gradients(made.values, adding=number > 0)
                    self._take_buffers(made, (stop - first) / step.num_samples, adding=number > 0)
            finally:
                self._undo()
        return made

    def _backward(self, batch: Any, num_samples: int, of: int, values: Tensor) -> None:
        """Differentiate the piece's share of the step's loss, and note the loss."""
        with self._autocast():
            loss, count = read_loss(self._training.loss(self._training.model, batch))
            if count is None:
                share = loss if num_samples == of else loss * (num_samples / of)
            else:
                share = loss / (count if num_samples == of else of)
        (share if self._scale is None else share * self._scale.value).backward()  # type: ignore[no-untyped-call]
        values[self._layout.loss] += share.detach()
        if count is not None and num_samples != of:
            values[self._layout.loss + 1] += count / of
            values[self._layout.loss + 2] += 1.0

    def _take_gradients(self, values: Tensor, *, adding: bool) -> None:
        """Copy the gradients into the vector, or add them to what earlier passes over the piece left there."""
        layout = self._layout
        self._refuse_sparse()
        used = [parameter.grad is not None for parameter in layout.parameters]
        views, found = [], []
        for parameter, view in zip(layout.parameters, layout.gradient_views(values), strict=True):
            if parameter.grad is not None:
                views.append(view)
                found.append(real(parameter.grad))
            elif not adding:
                view.zero_()
        if views:
            (foreach_add_ if adding else foreach_copy_)(views, found)
        values[layout.used.start : layout.used.stop] += torch.tensor(used, dtype=values.dtype).to(values.device)

    def _take_buffers(self, made: Contribution, share: float, *, adding: bool) -> None:
        layout = self._layout
        self._before.refuse_growth()
        now = layout.buffers()
        floats = now[: len(layout.floats)]
        if floats:
            views = layout.buffer_views(made.values)
            now_real = [real(buffer) for buffer in floats]
            if adding:
                foreach_add_(views, now_real, alpha=share)
            else:
                foreach_copy_(views, now_real)
            if share == 1.0:
                made.values[layout.changed.start : layout.changed.stop] = 1.0
            else:
                if not adding:
                    foreach_mul_(views, share)
                changed = [(buffer != old).any() for buffer, old in zip(floats, self._before.contents, strict=False)]
                made.values[layout.changed.start : layout.changed.stop] += torch.stack(changed)
        if adding:
            return
        for view, buffer in zip(layout.whole_views(made.integers), now[len(floats) :], strict=True):
            view.copy_(buffer)


class PendingLoss:
    """A loss on its way to the host.

    It is known after the forward pass, so nobody has to wait for the backward pass: while a GPU makes that, the update
    and the next step are launched, and it never idles between steps.
    """

    def __init__(self, loss: Tensor) -> None:
        self._value = loss
        self._arrived: torch.cuda.Event | None = None
        if loss.is_cuda:
            self._value = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss.detach(), non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def value(self) -> float:
        """The loss, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value.item()


def add_contributions(left: Contribution, right: Contribution) -> Contribution:
    """Add the right subtree into the left one."""
    left += right
    return left


def read_loss(result: Any) -> tuple[Tensor, Tensor | float | None]:
    """What ``loss`` returned, as a scalar and, where it came as (sum, count), the count."""
    if isinstance(result, Tensor) and result.ndim == 0 and result.requires_grad:
        return result, None
    loss, count = result, None
    way_out = "Return the mean over the batch's samples, or (sum, count)."
    if isinstance(result, tuple | list):
        if len(result) != 2:
            raise TrainingError(f"loss returned {len(result)} values. {way_out}")
        loss, count = result
        if isinstance(count, Tensor):
            if count.numel() != 1:
                raise TrainingError(f"loss returned a count of shape {tuple(count.shape)}. {way_out}")
            count = count.detach().reshape(())
        elif isinstance(count, bool) or not isinstance(count, int | float):
            raise TrainingError(f"loss returned a count that is a {type(count).__name__}. {way_out}")
    if not isinstance(loss, Tensor):
        raise TrainingError(f"loss returned a {type(loss).__name__}. {way_out}")
    if loss.numel() != 1:
        raise TrainingError(f"loss returned a tensor of shape {tuple(loss.shape)}. {way_out}")
    if not loss.requires_grad:
        raise TrainingError("loss returned a number that does not depend on the model's parameters; was it detached?")
    return loss.reshape(()), count
