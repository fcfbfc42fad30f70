"""Step graphs: captures, verifies and replays forward, backward and update of a step with static shapes.

1. The first step with a batch signature runs eagerly. The second runs eagerly on the capture stream; it is then
   captured, and the graph is replayed from the same state. Both must give bitwise equal losses, gradients and buffers,
   and after the update equal weights and optimizer states. One more step, with another batch, random numbers and
   learning rate, is checked in the same way. From then on the graph is replayed.
2. A graph that differs, or cannot be captured, is replaced by eager execution for good, and the job's story says why.
   Checked steps keep the eager result, so checking never changes what is learned.
3. Forward and backward are two graphs, so that the host reads the loss during the backward pass: a non-finite loss
   prevents the update, and the device never waits for the host.

Graphs hold addresses: a moved weight or a state in other tensors invalidates them, and new ones are captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carpool.runtime.engine.determinism import NondeterministicOps
from carpool.runtime.engine.flat_buffers import FlatLayout, copy_tensors
from carpool.runtime.engine.forward_backward import ForwardBackward, Step
from carpool.runtime.engine.optimizer_step import OptimizerStep
from carpool.runtime.graphs.capture import GraphCapture, capture_failure
from carpool.runtime.graphs.captured_step import (
    BatchSignature,
    CapturedStep,
    CapturedUpdate,
    NonStaticBatch,
    batch_signature,
    fill_static,
    static_copy,
    static_metrics,
)
from carpool.runtime.graphs.verification import (
    OptimizerOptions,
    copies,
    host_rng_state,
    optimizer_scalars,
    optimizer_tensors,
    tensors_equal,
)

_MAX_SIGNATURES = 4  # full and last partial batches, before and after a change of the batch size
_MAX_MOVES = 8  # of weights or buffers, before any graph was verified
_MAX_UPDATES = 32  # graphs of the update for changed optimizer options
_REPLACES_TENSOR = "the pass replaces a weight or a buffer of the model by another tensor"


class _EagerPass(NamedTuple):
    """The results of an eager pass: the reference for the graph."""

    loss: float
    gradients: list[Tensor | None]
    buffers: list[Tensor]


class StepGraphs:
    """The CUDA graphs of one trainer."""

    def __init__(
        self,
        passes: ForwardBackward,
        update: OptimizerStep,
        layout: FlatLayout,
        nondeterministic_ops: NondeterministicOps,
        capture: GraphCapture,
        *,
        tolerant: bool = False,  # verify within a tolerance instead of bitwise
    ) -> None:
        self._passes = passes
        self._update = update
        self._layout = layout
        self._nondeterministic_ops = nondeterministic_ops
        self._capture = capture
        self._always_tolerant = tolerant
        self._optimizer = update.optimizer
        self._captured: dict[BatchSignature, CapturedStep | None] = {}  # None: seen once, not captured yet
        self._self_gathering: dict[int, CapturedStep] = {}  # graphs that gather their batch, by batch size
        self._current: CapturedStep | None = None  # holds the gradients for the next update
        self._addresses: list[tuple[int, bool]] = []  # of each tensor, and whether it requires a gradient
        self._moves = 0  # of weights or buffers, since a graph was last verified
        self._options: OptimizerOptions | None = None
        self._updates_captured = 0
        self._all_notes: set[str] = set()
        self.eager_reason = ""  # why passes run eagerly for good
        self.eager_update_reason = ""  # why updates run eagerly for good
        self.notes: list[str] = []  # for the job's story

    def reset(self) -> None:
        self._captured.clear()
        self._self_gathering.clear()
        self._current = None
        self._capture.reset()

    def note_eager(self, reason: str) -> None:
        self._note(f"steps run without CUDA graphs: {reason}")

    @property
    def can_queue_step(self) -> bool:
        """Whether a whole step, not only its head, may be queued while another process uses the device."""
        return not self._capture.has_branches

    @property
    def is_warmed_up(self) -> bool:
        """Whether capture and checks are over: what can be captured is replayed, the rest runs eagerly for good."""
        verified = [each for each in self._captured.values() if each is not None and each.is_verified]
        has_all = any(each.is_fully_verified for each in verified) or bool(verified and self.eager_update_reason)
        return bool(self.eager_reason) or has_all

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def forward_backward(self, step: Step) -> float:
        """Run forward and backward of a step and return its loss; call `optimizer_step` next."""
        self._current = None
        if not self.eager_reason:
            self._drop_moved()
        if (captured := self._self_gathering.get(step.num_samples)) is None:
            self._passes.before_launch()
            batch = self._passes.fetch_batch(step)
            captured = self._captured_for(batch, step.num_samples)
            if captured is None:
                return self._passes.single_pass(batch, step.number)
            if not captured.is_verified:
                return self._verify_pass(captured, batch, step)
            if captured.gather is None:
                fill_static(captured.batch, batch)
        self._current = captured
        return self._replay_pass(captured, step)

    def _drop_moved(self) -> None:
        tensors = (*self._layout.parameters, *self._layout.buffers())
        addresses = [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]
        if addresses != self._addresses:
            self.reset()
            self._addresses = addresses
            self._moves += 1

    def _captured_for(self, batch: Any, count: int) -> CapturedStep | None:
        """The graphs for such batches, captured or about to be; None: run eagerly."""
        if self.eager_reason:
            return None
        try:
            key = batch_signature(batch)
        except NonStaticBatch as error:
            self.disable(str(error))
            return None
        if self._moves > _MAX_MOVES:
            self.disable(_REPLACES_TENSOR)
            return None
        if key in self._captured:
            captured = self._captured[key]
            if captured is None:
                captured = self._captured[key] = self._new_captured(batch, key, count)
            return captured
        if len(self._captured) < _MAX_SIGNATURES:
            self._captured[key] = None
        else:
            self._note(f"more than {_MAX_SIGNATURES} batch shapes: further ones run without CUDA graphs")
        return None

    def _new_captured(self, batch: Any, key: BatchSignature, count: int) -> CapturedStep:
        buffers, device = self._layout.buffers(), self._layout.device
        device_loss = torch.zeros((), dtype=torch.float64, device=device)
        host_loss = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        gather = self._passes.batches.gather_buffer(count)
        if gather is not None and batch_signature(gather.batch) != key:
            gather = None
        static = static_copy(batch) if gather is None else gather.batch
        return CapturedStep(static, gather, device_loss, host_loss, buffers, copies(buffers))

    def _replay_pass(self, captured: CapturedStep, step: Step) -> float:
        assert captured.forward is not None
        assert captured.backward is not None
        if captured.gather is not None:
            captured.gather.set_samples(step.draw.samples)
        self._passes.seed(step.number)
        self._passes.metrics = captured.metrics
        captured.forward.head()
        self._passes.before_launch()
        captured.forward.tail()
        self._capture.copy_to_host(captured.device_loss, captured.host_loss)
        captured.backward()
        self._passes.after_launch()
        self._capture.wait_for_copy()
        loss = captured.host_loss.item()
        if not math.isfinite(loss):
            self._layout.restore_buffers(captured.buffers, captured.buffers_before)
            self._current = None
        return loss

    def _verify_pass(self, captured: CapturedStep, batch: Any, step: Step) -> float:
        passes, layout = self._passes, self._layout
        buffers, before = layout.buffers(), copies(layout.buffers())
        passes.seed(step.number)
        rng_state, weights = host_rng_state(layout.device), passes.mutation_guard.stamp()
        with self._capture.side_stream():
            loss = passes.single_pass(batch, step.number)
        if not math.isfinite(loss):
            return loss
        used_host_rng = host_rng_state(layout.device) != rng_state
        eager = _EagerPass(loss, passes.gradients(), copies(layout.buffers()))
        if used_host_rng:
            problem = "the pass draws random numbers on the host"
        elif passes.mutation_guard.stamp() != weights:  # a second pass would change them again
            problem = "the loss function modifies weights"
        elif any(now is not then for now, then in zip(layout.buffers(), buffers, strict=True)):
            problem = _REPLACES_TENSOR
        else:
            passes.clear_gradients()
            layout.restore_buffers(captured.buffers, before)
            problem = self._check_pass(captured, batch, step, eager)
        if problem:
            self.disable(problem)
            layout.restore_buffers(buffers, eager.buffers)
            passes.set_gradients(eager.gradients)
            return loss
        captured.checks_passed += 1
        if captured.is_verified:
            self._start_replaying(captured, step)
        self._current = captured
        return loss

    def _check_pass(self, captured: CapturedStep, batch: Any, step: Step, eager: _EagerPass) -> str:
        """Replay the pass, captured first if necessary; returns how it differs from the eager one, or ""."""
        try:
            if captured.forward is None:
                self._capture_pass(captured)
            if captured.gather is None:
                fill_static(captured.batch, batch)
            loss = self._replay_pass(captured, step)
        except Exception as error:  # noqa: BLE001 - user code may raise anything during capture
            return capture_failure(error)
        tolerant = self._is_tolerant
        is_same = math.isclose(loss, eager.loss, rel_tol=1e-3) if tolerant else loss == eager.loss
        used = [gradient is not None for gradient in eager.gradients]
        if not is_same or used != [gradient is not None for gradient in captured.gradients]:
            return f"check failed: the loss is {loss!r} after replay and {eager.loss!r} in eager mode"
        if not tensors_equal(_not_none(captured.gradients), _not_none(eager.gradients), tolerant=tolerant):
            return "check failed: gradients differ after replay"
        if not tensors_equal(captured.buffers, eager.buffers, tolerant=tolerant):
            return "check failed: buffers differ after replay"
        return ""

    def _start_replaying(self, captured: CapturedStep, step: Step) -> None:
        self._moves = 0
        if captured.gather is not None:
            self._self_gathering[step.num_samples] = captured
        how = "within tolerance" if self._is_tolerant else "bit for bit"
        self._note(f"steps are replayed as CUDA graphs, verified {how} against eager steps")
        if self._capture.has_branches:
            self._note("the CUDA graphs have branches: before its turn a step is queued up to the first fork only")

    def _capture_pass(self, captured: CapturedStep) -> None:
        passes = self._passes
        losses: list[Tensor] = []

        def forward() -> None:
            copy_tensors(captured.buffers_before, captured.buffers)
            if captured.gather is not None:
                captured.gather.gather()
            loss = passes.forward(captured.batch)
            captured.device_loss.copy_(loss.detach())
            captured.metrics = static_metrics(passes.metrics)
            losses.append(loss)

        def backward() -> None:
            passes.backward(losses.pop())

        passes.clear_gradients()
        try:
            captured.forward = self._capture.capture(forward, starts_step=True)
            captured.backward = self._capture.capture(backward)
            captured.gradients = passes.gradients()
        finally:
            passes.clear_gradients()

    def optimizer_step(self, on_launched: Callable[[], object] | None = None) -> None:
        """Update the weights from the gradients of `forward_backward`.

        ``on_launched`` is called after the last kernel launch, except in steps that verify a graph.
        """
        is_first = self._update.creates_state
        self._optimizer_step(on_launched)
        if is_first and not self._update.reuse_state():
            self.reset()

    def _optimizer_step(self, on_launched: Callable[[], object] | None) -> None:
        captured, self._current = self._current, None
        options = OptimizerOptions(self._optimizer)
        unchanged = self._options is not None and options.are_same_as(self._options)
        self._options = options
        if captured is None:
            self._update.clip_and_apply(on_launched)
            return
        update = captured.update
        is_same = update is not None and update.is_verified and options.are_same_as(update.options)
        if update is not None and is_same and not self._update.creates_state:
            update.replay()
            if on_launched is not None:
                on_launched()
        elif self.eager_update_reason or not unchanged or self._update.creates_state:
            self._eager_update(captured, on_launched)
        else:
            self._verify_update(captured, options)

    def _eager_update(self, captured: CapturedStep, on_launched: Callable[[], object] | None = None) -> None:
        self._passes.set_gradients(captured.gradients)
        self._update.clip_and_apply(on_launched)

    def _verify_update(self, captured: CapturedStep, options: OptimizerOptions) -> None:
        optimizer = self._optimizer
        optimizer_state, scalars = optimizer_tensors(optimizer), optimizer_scalars(optimizer)
        state, gradients = [*self._layout.parameters, *optimizer_state], _not_none(captured.gradients)
        copied = self._copy_for_check(optimizer_state, state, gradients)
        if copied is None:
            self._eager_update(captured)
            return
        before, gradients_before, eager = copied
        with self._capture.side_stream():
            self._eager_update(captured)
        now = optimizer_tensors(optimizer)
        if len(now) != len(optimizer_state) or any(a is not b for a, b in zip(now, optimizer_state, strict=True)):
            return  # the optimizer has just created its state: verify the next step
        if optimizer_scalars(optimizer) != scalars:
            self._disable_update(f"{type(optimizer).__name__} counts steps in Python")
            return
        copy_tensors(eager, state)
        copy_tensors(state, before)
        copy_tensors(gradients, gradients_before)
        if problem := self._check_update(captured, options, optimizer_state, eager):
            copy_tensors(state, eager)
            self._disable_update(problem)
        elif captured.update is not None:
            captured.update.checks_passed += 1

    def _copy_for_check(
        self, optimizer_state: list[Tensor], state: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
        """Allocate all copies before weights change: running out of memory later would lose the step."""
        if any(tensor.device != self._layout.device for tensor in optimizer_state):
            self._disable_update(f"{type(self._optimizer).__name__} keeps state on the host")
            return None
        try:
            return copies(state), copies(gradients), copies(state)
        except torch.OutOfMemoryError:
            self._disable_update("not enough memory to verify it")
            return None

    def _check_update(
        self, captured: CapturedStep, options: OptimizerOptions, optimizer_state: list[Tensor], eager: list[Tensor]
    ) -> str:
        """Replay the update, captured first if necessary; returns how it differs from the eager one, or ""."""
        try:
            if captured.update is None or not options.are_same_as(captured.update.options):
                self._capture_update(captured, options, optimizer_state)
            assert captured.update is not None
            captured.update.replay()
            state = [*self._layout.parameters, *optimizer_state]
            same = tensors_equal(state, eager, tolerant=self._is_tolerant)
            return "" if same else "check failed: weights or optimizer state differ after replay"
        except Exception as error:  # noqa: BLE001 - an optimizer may raise anything during capture
            return capture_failure(error)
        finally:
            self._update.clear_gradients()

    def _capture_update(self, captured: CapturedStep, options: OptimizerOptions, optimizer_state: list[Tensor]) -> None:
        self._updates_captured += 1
        if self._updates_captured > _MAX_UPDATES:
            raise RuntimeError(f"optimizer options changed more than {_MAX_UPDATES} times")
        self._passes.set_gradients(captured.gradients)

        def work() -> None:
            self._update.clip()
            self._update.step()

        captured.update = None
        captured.update = CapturedUpdate(self._capture.capture(work), options, optimizer_state)

    @property
    def _is_tolerant(self) -> bool:
        return self._always_tolerant or bool(self._nondeterministic_ops.operations)

    def disable(self, reason: str) -> None:
        """Run passes eagerly from now on."""
        self.eager_reason = reason
        self.reset()
        self.note_eager(reason)

    def _disable_update(self, reason: str) -> None:
        self.eager_update_reason = reason
        self.reset()  # a failed capture may have invalidated the others
        self._note(f"optimizer steps run without a CUDA graph: {reason}")

    def _note(self, note: str) -> None:
        if note not in self._all_notes:
            self._all_notes.add(note)
            self.notes.append(note)


def _not_none(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]
