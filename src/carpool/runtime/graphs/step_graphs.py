"""Step graphs: captures, verifies and replays forward, backward and update of a step with static shapes.

The life of a recording:

1. The first pass over a batch of some outline is made by the code. The next one too, aside, and then it is recorded and
   replayed from the same state: loss, gradients and buffers must come out bit for bit. So must the weights and what the
   optimizer remembers, for the update. The step after that is made both ways once more, with another batch, other
   random numbers and another learning rate. From then on it is replayed.
2. Whatever is found to differ, or cannot be recorded, is made by the code for ever, and the job's story says why. The
   steps in question had the code's own result all along: a proof never changes what is learned.
3. Forward and backward are two recordings, so that the loss is read while the backward pass computes: one that is no
   number stops the update, and the device never waits for us.

Recordings hold addresses: a loaded state or a moved weight ends them, and new ones are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
)
from carpool.runtime.graphs.verification import (
    OptimizerOptions,
    copies,
    host_rng_state,
    optimizer_scalars,
    optimizer_tensors,
    tensors_equal,
)

_MOST_OUTLINES = 4  # whole batches, last partial ones, and what a change of the batch size brings
_MOST_MOVES = 8  # before any recording could be trusted
_MOST_UPDATES = 32  # recordings of the update for settings that changed


class StepGraphs:
    """The recordings of one trainer."""

    def __init__(
        self,
        passes: ForwardBackward,
        update: OptimizerStep,
        layout: FlatLayout,
        caveats: NondeterministicOps,
        recorder: GraphCapture,
        *,
        loosely: bool = False,  # bits are not promised, so none are compared
    ) -> None:
        self._passes = passes
        self._update = update
        self._layout = layout
        self._caveats = caveats
        self._recorder = recorder
        self._is_free = loosely
        self._optimizer = update.optimizer
        self._takes: dict[BatchSignature, CapturedStep | None] = {}  # None: seen, not recorded yet
        self._gathered: dict[int, CapturedStep] = {}  # those that fetch their batches themselves, by their length
        self._now: CapturedStep | None = None  # whose gradients the next update takes
        self._addresses: list[int] = []
        self._moves = 0  # of weights or buffers, since a recording was trusted last
        self._options: OptimizerOptions | None = None
        self._updates = 0
        self._told: set[str] = set()
        self.refusal = ""  # why passes are made by the code
        self.update_refusal = ""  # why updates are
        self.news: list[str] = []  # for the job's story

    def forget(self) -> None:
        """Let go of all recordings: the tensors they touch are not the training's any more."""
        self._takes.clear()
        self._gathered.clear()
        self._now = None
        self._recorder.start_over()

    def pass_by(self, why: str) -> None:
        """A step is made without asking here; why, in words."""
        self._tell(f"steps are made without CUDA graphs: {why}")

    @property
    def may_queue(self) -> bool:
        """Whether a whole step may stand queued on a device on which another process computes, not its head alone."""
        return not self._recorder.has_branches

    @property
    def is_settled(self) -> bool:
        """Whether a step like the last one would be replayed, as far as it ever will be."""
        takes = [take for take in self._takes.values() if take is not None and take.is_proven]
        return bool(self.refusal or any(take.is_proven_wholly for take in takes) or (takes and self.update_refusal))

    def take_news(self) -> list[str]:
        """What has not been told yet."""
        news, self.news = self.news, []
        return news

    # -- the pass -----------------------------------------------------------------------------------------------------

    def make_pass(self, step: Step) -> float:
        """The loss of a step's pass; `make_update` has to follow, or the pass is void."""
        self._now = None
        if not self.refusal:
            self._look_for_moves()
        if (take := self._gathered.get(step.num_samples)) is None:
            self._passes.starts()
            batch = self._passes.fetch(step)
            take = self._take_for(batch, step.num_samples)
            if take is None:
                return self._passes.whole(batch, step.number)
            if not take.is_proven:
                return self._prove_pass(take, batch, step)
            if take.gathering is None:
                fill_static(take.batch, batch)
        self._now = take
        return self._replay_pass(take, step)

    def _look_for_moves(self) -> None:
        """Let go of recordings whose weights or buffers lie elsewhere now."""
        addresses = [tensor.data_ptr() for tensor in (*self._layout.parameters, *self._layout.buffers())]
        if addresses != self._addresses:
            self.forget()
            self._addresses = addresses
            self._moves += 1

    def _take_for(self, batch: Any, count: int) -> CapturedStep | None:
        """The take for such batches, if they shall be replayed or just now recorded."""
        if self.refusal:
            return None
        try:
            key = batch_signature(batch)
        except NonStaticBatch as error:
            self._refuse(str(error))
            return None
        if self._moves > _MOST_MOVES:
            self._refuse("the pass replaces a weight or a buffer of the model by another tensor")
            return None
        if key in self._takes:
            take = self._takes[key]
            if take is None:
                take = self._takes[key] = self._new_take(batch, key, count)
            return take
        if len(self._takes) < _MOST_OUTLINES:
            self._takes[key] = None
        else:
            self._tell(f"batches of more than {_MOST_OUTLINES} shapes: the later ones are not recorded as CUDA graphs")
        return None

    def _new_take(self, batch: Any, key: BatchSignature, count: int) -> CapturedStep:
        buffers, device = self._layout.buffers(), self._layout.device
        made = torch.zeros((), dtype=torch.float64, device=device)
        loss = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        gathering = self._passes.samples.gathering(count)
        if gathering is not None and batch_signature(gathering.batch) != key:
            gathering = None
        place = static_copy(batch) if gathering is None else gathering.batch
        return CapturedStep(place, gathering, made, loss, buffers, copies(buffers))

    def _replay_pass(self, take: CapturedStep, step: Step) -> float:
        assert take.forward is not None
        assert take.backward is not None
        if take.gathering is not None:
            take.gathering.choose(step.draw.samples)
        self._passes.seed(step.number)
        take.forward.head()
        self._passes.starts()
        take.forward.rest()
        self._recorder.bring(take.made, take.loss)
        take.backward()
        self._passes.queued()
        self._recorder.wait()
        loss = take.loss.item()
        if not math.isfinite(loss):
            self._layout.put_back(take.buffers, take.before)
            self._now = None
        return loss

    def _prove_pass(self, take: CapturedStep, batch: Any, step: Step) -> float:
        """Make the pass by the code, then by the recording from the same state; the code's result stands."""
        passes, layout = self._passes, self._layout
        kept, before = layout.buffers(), copies(layout.buffers())
        passes.seed(step.number)
        chance = host_rng_state(layout.device)
        with self._recorder.aside():
            loss = passes.whole(batch, step.number)
        if not math.isfinite(loss):
            return loss
        drawn = host_rng_state(layout.device) != chance
        wanted, after = passes.gradients(), copies(layout.buffers())
        if drawn:
            problem = "the pass draws random numbers on the host"
        elif any(now is not then for now, then in zip(layout.buffers(), kept, strict=True)):
            problem = "the pass replaces a weight or a buffer of the model by another tensor"
        else:
            passes.clear()
            problem = self._try_pass(take, batch, step, before, loss, wanted, after)
        if problem:
            self._refuse(problem)
            layout.put_back(kept, after)
            passes.hang(wanted)
            return loss
        take.proofs += 1
        if take.is_proven:
            self._moves = 0
            if take.gathering is not None:
                self._gathered[step.num_samples] = take
            how = "closely" if self._compares_loosely else "bit for bit"
            self._tell(f"steps are replayed as CUDA graphs, checked {how} against the code")
            if self._recorder.has_branches:
                self._tell("its CUDA graphs have branches: a step is queued up to the first of them before its turn")
        self._now = take
        return loss

    def _try_pass(
        self,
        take: CapturedStep,
        batch: Any,
        step: Step,
        before: list[Tensor],
        loss: float,
        wanted: list[Tensor | None],
        after: list[Tensor],
    ) -> str:
        """What is wrong with the recording, if anything; it is made if there is none yet."""
        self._layout.put_back(take.buffers, before)
        try:
            if take.forward is None:
                self._record_pass(take)
            if take.gathering is None:
                fill_static(take.batch, batch)
            found = self._replay_pass(take, step)
        except Exception as error:  # noqa: BLE001 - whatever user code does while it is recorded
            return capture_failure(error)
        loosely = self._compares_loosely
        is_same = math.isclose(found, loss, rel_tol=1e-3) if loosely else found == loss
        used = [gradient is not None for gradient in wanted]
        if not is_same or used != [gradient is not None for gradient in take.gradients]:
            return f"recorded, it gives another loss: {found!r} instead of {loss!r}"
        if not tensors_equal(_some(take.gradients), _some(wanted), loosely=loosely):
            return "recorded, it gives other gradients"
        if not tensors_equal(take.buffers, after, loosely=loosely):
            return "recorded, it leaves other buffers"
        return ""

    def _record_pass(self, take: CapturedStep) -> None:
        passes = self._passes
        made: list[Tensor] = []

        def forward() -> None:
            copy_tensors(take.before, take.buffers)
            if take.gathering is not None:
                take.gathering.gather()
            loss = passes.forward(take.batch)
            take.made.copy_(loss.detach())
            made.append(loss)

        def backward() -> None:
            passes.backward(made.pop())

        passes.clear()
        try:
            take.forward = self._recorder.record(forward, leads=True)
            take.backward = self._recorder.record(backward)
            take.gradients = passes.gradients()
        finally:
            passes.clear()

    # -- the update ---------------------------------------------------------------------------------------------------

    def make_update(self, then: Callable[[], object] | None = None) -> None:
        """New weights from the gradients that `make_pass` left; ``then`` is called behind those without proof."""
        take, self._now = self._now, None
        options = OptimizerOptions(self._optimizer)
        steady = self._options is not None and options.are_same_as(self._options)
        self._options = options
        if take is None:
            self._update.make(then)
            return
        update = take.update
        if update is not None and update.is_proven and options.are_same_as(update.options):
            update.replay()
            if then is not None:
                then()
        elif self.update_refusal or not steady:
            self._by_code(take, then)
        else:
            self._prove_update(take, options)

    def _by_code(self, take: CapturedStep, then: Callable[[], object] | None = None) -> None:
        self._passes.hang(take.gradients)
        self._update.make(then)

    def _prove_update(self, take: CapturedStep, options: OptimizerOptions) -> None:
        """Make the update by the code, then by the recording from the same state; the code's result stands."""
        update, optimizer = self._update, self._optimizer
        remembered, numbers = optimizer_tensors(optimizer), optimizer_scalars(optimizer)
        state = [*self._layout.parameters, *remembered]
        gradients = _some(take.gradients)
        if any(tensor.device != self._layout.device for tensor in remembered):
            self._refuse_update(f"{type(optimizer).__name__} counts on the host")
            self._by_code(take)
            return
        try:
            # The last one for the code's result: there must be no way to run out of memory once weights have changed.
            before, given, after = copies(state), copies(gradients), copies(state)
        except torch.OutOfMemoryError:
            self._refuse_update("there is no memory to check it in")
            self._by_code(take)
            return
        with self._recorder.aside():
            self._by_code(take)
        now = optimizer_tensors(optimizer)
        if len(now) != len(remembered) or any(a is not b for a, b in zip(now, remembered, strict=True)):
            return  # it has just begun to remember; the next step will do
        if optimizer_scalars(optimizer) != numbers:
            self._refuse_update(f"{type(optimizer).__name__} counts in Python")
            return
        copy_tensors(after, state)
        copy_tensors(state, before)
        copy_tensors(gradients, given)
        try:
            if take.update is None or not options.are_same_as(take.update.options):
                self._record_update(take, options, remembered)
            assert take.update is not None
            take.update.replay()
            same = tensors_equal(state, after, loosely=self._compares_loosely)
            problem = "" if same else "recorded, it gives other weights"
        except Exception as error:  # noqa: BLE001 - an optimizer may do anything
            problem = capture_failure(error)
        finally:
            update.drop_gradients()
        if problem:
            copy_tensors(state, after)
            self._refuse_update(problem)
        elif take.update is not None:
            take.update.proofs += 1

    def _record_update(self, take: CapturedStep, options: OptimizerOptions, remembered: list[Tensor]) -> None:
        self._updates += 1
        if self._updates > _MOST_UPDATES:
            raise RuntimeError("the optimizer's settings change too often")
        self._passes.hang(take.gradients)

        def work() -> None:
            self._update.clip()
            self._update.step()

        take.update = None
        take.update = CapturedUpdate(self._recorder.record(work), options, remembered)

    @property
    def _compares_loosely(self) -> bool:
        return self._is_free or bool(self._caveats.operations)

    # -- words --------------------------------------------------------------------------------------------------------

    def _refuse(self, why: str) -> None:
        self.refusal = why
        self.forget()
        self._tell(f"steps are made without CUDA graphs: {why}")

    def _refuse_update(self, why: str) -> None:
        self.update_refusal = why
        self.forget()  # a recording that failed may have taken the others along
        self._tell(f"updates are made without a CUDA graph: {why}")

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            self.news.append(words)


def _some(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]
