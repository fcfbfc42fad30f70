"""Trainer: runs a training step by step, resumable, with steps that several processes can share.

A single process calls `step`. For a step shared by several processes, each holds a `Trainer` of the same training:

    step = trainer.next_step(parts)                    # the same in every process
    mine = trainer.contribute(step, range of pieces)   # leaves the trainer unchanged, so it can be repeated
    total = …                                          # all contributions summed in tree order (reduce/shards.py)
    sums = trainer.apply(step, total, parameters)      # updates all parameters or some of them
    done = trainer.advance(step, sums)                 # counters, schedule, after_update
    if trainer.evaluation_due: trainer.record_metrics(trainer.evaluate())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from carpool.runtime.data.sampler import Cursor
from carpool.runtime.engine.custom_step import (
    check_custom_step,
    leftover_gradients,
    read_step_result,
    restore_gradients,
)
from carpool.runtime.engine.determinism import (
    NondeterministicOps,
    enable_determinism,
    intra_op_threads,
    seed_evaluation,
    seed_update,
)
from carpool.runtime.engine.device_setup import place_training
from carpool.runtime.engine.early_gradients import GradientsReady
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, PendingLoss, StepSums
from carpool.runtime.engine.forward_backward import (
    Contributions,
    ContributionSlots,
    ForwardBackward,
    LaunchObserver,
    Step,
    add_contributions,
)
from carpool.runtime.engine.optimizer_set import optimizers_of
from carpool.runtime.engine.optimizer_step import LossScale, OptimizerStep
from carpool.runtime.engine.pass_guards import ModelFlags, has_extra_state
from carpool.runtime.engine.progress import Progress, divergence_error, read_finite_sums
from carpool.runtime.engine.step_source import StepSource
from carpool.runtime.engine.stop_criteria import Best, metric
from carpool.runtime.engine.training import Report, Training, as_metrics, schedule_state
from carpool.runtime.errors import CheckpointError
from carpool.runtime.graphs.capture import CudaGraphCapture, GraphCapture
from carpool.runtime.graphs.function_graph import FunctionGraph
from carpool.runtime.graphs.step_graphs import StepGraphs
from carpool.runtime.reduce.shards import (
    MicroBatchLimits,
    check_shards,
    max_micro_batch,
    root,
    tree_sum,
)
from carpool.runtime.state.checkpoint import check_compatible

DEFAULT_SHARDS = 8
_EXTRA_STATE = "the model has extra state (get_extra_state), which only Python changes"


@dataclass(frozen=True, slots=True)
class StepDone:
    """The result of a step."""

    step: int  # steps done, this one included
    epoch: int  # epochs done
    loss: float  # mean over the step
    num_samples: int
    skipped: bool = False  # a float16 gradient overflowed: the weights were not updated


class Trainer:
    """The mutable state of a training on one device, and the operations of a step."""

    def __init__(
        self,
        training: Training,
        *,
        seed: int = 0,
        exact: bool = False,
        shards: int = DEFAULT_SHARDS,
        device: str | torch.device = "cpu",
        graph: bool = True,
        deterministic: bool = True,
    ) -> None:
        check_shards(shards)
        check_custom_step(training, exact=exact)
        self.training = training
        self.seed = seed
        self.shards = shards if exact else None
        self.device = torch.device(device)
        self.batch_size = training.batch_size
        self.limits: MicroBatchLimits = ()  # set after a pass ran out of memory
        self.cursor = Cursor()
        self.progress = Progress(training)
        self.notes = enable_determinism(deterministic=deterministic)  # for the job's story
        self.nondeterministic_ops = NondeterministicOps()
        self._source = StepSource(training, seed, self.shards)
        self._source.check_batch_size(self.batch_size, self.cursor.offset)
        place_training(training, self.device)
        self._scale = LossScale() if training.autocast_dtype is torch.float16 else None
        may_unfreeze = training.after_update is not None
        self.layout = FlatLayout(training.model, training.whole_optimizer, with_frozen=may_unfreeze)
        self._flags = ModelFlags(training.model)
        self._passes = ForwardBackward(training, self.layout, seed, self._scale, self._source.stream)
        self.notes += self._passes.batches.notes
        self.update = OptimizerStep(training, self.layout, self._scale)
        self.is_first_rank = True  # its process calls on_step_end and on_epoch_end
        self.graphs: StepGraphs | None = None  # CUDA only
        self.function_graph: FunctionGraph | None = None  # likewise, of a step function
        if graph and self.device.type == "cuda":
            capture = CudaGraphCapture(self.device)
            if training.step is not None:
                self.function_graph = self.new_function_graph(capture, tolerant=not deterministic)
            else:
                self.graphs = self.new_graphs(capture, tolerant=not deterministic)

    def step(self, parts: tuple[int, ...] = ()) -> StepDone:
        step = self.next_step(parts)
        done = self.advance(step, self.compute(step))
        if self.evaluation_due:
            self.record_metrics(self.evaluate())
        return done

    def steps(self) -> Iterator[StepDone]:
        while not self.stop_reason:
            yield self.step()

    def next_step(self, parts: tuple[int, ...] = ()) -> Step:
        """The next step: its samples and their split. ``parts`` (default mode) are samples per device."""
        limits = (max_micro_batch(self.limits, self.cursor.step), self.training.micro_batch)
        limit = min((each for each in limits if each), default=0)
        return self._source.step_at(self.cursor, self.batch_size, parts, limit)

    def compute(self, step: Step) -> StepSums:
        """Update the weights from all pieces of a step; `advance` counts it."""
        if self.training.step is not None:
            return self.custom_step(step)
        if self.is_single_pass(step):
            return self.apply_single_pass(step, self.single_pass(step))
        return self.apply(step, self.combine(step, self.contribute(step, range(len(step.bounds)))))

    def contribute(
        self, step: Step, pieces: range, slots: ContributionSlots | None = None, ready: GradientsReady | None = None
    ) -> Contributions:
        self._prefetch(step, pieces)
        with self._reproducible():
            return self._passes.contribute(step, pieces, slots, ready)

    def combine(self, step: Step, contributions: Contributions) -> Contribution:
        with self._reproducible():
            total = tree_sum(contributions, root(len(step.bounds)), add_contributions)
        assert total is not None, "a step has samples"
        return total

    def apply(self, step: Step, total: Contribution, parameters: Collection[int] | None = None) -> StepSums:
        """Update the buffers, and the weights of some of the layout's parameters (default: all).

        ``total`` is only read, because other ranks may read the same memory. A step split into parts rounds differently
        from an unsplit one anyway, so its optimizer may use fused kernels.
        """
        self._check_next(step)
        with self._reproducible():
            sums = read_finite_sums(step, total, self.layout, self._scale, self.progress)
            self.update.load_buffers(total)
            self.update.use_fused(self.shards is None and len(step.bounds) > 1)
            if sums.finite:
                self.update.load_gradients(total, sums)
                if self.shards is not None and self.shards > 1:
                    seed_update(self.seed, step.number)
                self.update.apply(parameters)
        return sums

    def is_single_pass(self, step: Step) -> bool:
        return len(step.bounds) == 1 and not 0 < step.max_micro_batch < step.num_samples and self._scale is None

    def custom_step(self, step: Step, observer: LaunchObserver | None = None) -> StepSums:
        """Call the training's own step function, which also updates the weights."""
        training = self.training
        assert training.step is not None
        self._check_next(step)
        self._passes.observer = observer
        self._prefetch(step, range(1))
        self._passes.before_launch()
        batch = self._passes.fetch_batch(step)
        with self._reproducible():
            if self.function_graph is not None:
                result = self.function_graph.run(batch, step.number)
            else:
                self._passes.seed(step.number)
                result = training.step(training.model, batch, training.optimizer)
        self._passes.after_launch()
        loss, self._passes.metrics = read_step_result(result)
        return StepSums([], self._late_or_finite(step, loss), finite=True, counted=False)

    def _late_or_finite(self, step: Step, loss: Tensor | float) -> float | PendingLoss:
        if isinstance(loss, Tensor):
            pending = PendingLoss(loss)
            if pending.is_asynchronous and self.progress.may_read_late:
                return pending
            loss = pending.value()
        if not math.isfinite(loss):
            raise divergence_error(step.draw, loss, self.progress)
        return loss

    def single_pass(self, step: Step, observer: LaunchObserver | None = None) -> float | PendingLoss:
        """Run forward and backward of the whole step: returns the loss, leaves gradients on the parameters.

        Where a step is never captured, its loss is read one step late if nothing needs it earlier.
        """
        self._passes.observer = observer
        self._prefetch(step, range(1))
        with self._reproducible():
            if self.graphs is not None and not self.graphs.eager_reason:
                return self.graphs.forward_backward(step)
            self._passes.before_launch()
            batch = self._passes.fetch_batch(step)
            if self.device.type == "cpu" or not self.progress.may_read_late:
                return self._passes.single_pass(batch, step.number)
            return self._passes.launch_single_pass(batch, step.number)

    def apply_single_pass(
        self, step: Step, loss: float | PendingLoss, on_launched: Callable[[], object] | None = None
    ) -> StepSums:
        """Update the weights from the gradients that `single_pass` left.

        Only the loss is checked for being finite: a non-finite gradient shows in the next loss, and checking all its
        elements would cost more than the rest of this method. ``on_launched`` is called once the update is launched, if
        no user code runs before the next step.
        """
        self._check_next(step)
        with self._reproducible():
            if isinstance(loss, float) and not math.isfinite(loss):
                raise divergence_error(step.draw, loss, self.progress)
            self.update.use_fused(False)
            update = self.update.clip_and_apply if self.graphs is None else self.graphs.optimizer_step
            update(on_launched if self.progress.ends_with_update(step.draw, loss) else None)
        return StepSums([], loss, finite=True, counted=False)

    def advance(self, step: Step, sums: StepSums) -> StepDone:
        """Count the step once all weights are updated: cursor, schedule, ``after_update``, progress."""
        training = self.training
        self.cursor = step.draw.after
        if self._scale is not None:
            self._scale.update(finite=sums.finite)
        if sums.finite:
            every = training.schedule_every
            if every == "step" or (every == "epoch" and step.draw.ends_epoch):
                for schedule in training.schedules:
                    schedule.step()
            if training.after_update is not None:
                with self._reproducible() if self.shards is not None else nullcontext():
                    training.after_update(training.model, self.cursor.step)
        self.progress.record_step(step.draw, sums.loss)
        loss = self.progress.last_loss
        if training.on_step_end is not None and self.is_first_rank:
            training.on_step_end(self._report(loss, self.step_metrics()))
        if self.function_graph is not None and self._runs_other_code(step):
            self.function_graph.expect_changes()
        if step.draw.ends_epoch and not self.evaluation_due:
            self._end_epoch()
        return StepDone(self.cursor.step, self.cursor.epoch, loss, step.num_samples, not sums.finite)

    def _runs_other_code(self, step: Step) -> bool:
        """Whether functions of the user beside the step function, or a schedule, are called at the end of this step."""
        training = self.training
        in_each_step = training.after_update is not None or training.on_step_end is not None
        return in_each_step or bool(training.schedules) or step.draw.ends_epoch or self.evaluation_due

    def step_metrics(self) -> dict[str, float]:
        """The metrics that the loss or step function returned last; reading them waits for the device."""
        return as_metrics(self._passes.metrics, "step" if self.training.loss is None else "loss")

    def all_metrics(self) -> dict[str, float]:
        """The metrics of the last step and, above them, of the last evaluation."""
        return {**self.step_metrics(), **self.progress.metrics}

    def _end_epoch(self) -> None:
        if self.training.on_epoch_end is not None and self.is_first_rank:
            self.training.on_epoch_end(self._report(self.progress.epoch_loss, self.all_metrics()))

    def _report(self, loss: float, metrics: Mapping[str, float]) -> Report:
        return Report(self.cursor.step, self.cursor.epoch, loss, metrics, self.training.model)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def evaluate(self) -> dict[str, float]:
        """Call the training's ``evaluate`` with the model in eval mode; changes nothing."""
        assert self.training.evaluate is not None, "the training has no evaluate function"
        model = self.training.model
        modes = [(module, module.training) for module in model.modules()]
        seed_evaluation(self.seed, self.cursor.step)
        model.eval()
        try:
            with self._reproducible(), torch.no_grad():
                return as_metrics(self.training.evaluate(model))
        finally:
            for module, mode in modes:
                module.training = mode

    def record_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of this step; returns whether they are the best so far."""
        training = self.training
        for schedule in training.schedules if training.schedule_every == "evaluation" else ():
            if isinstance(schedule, ReduceLROnPlateau):
                schedule.step(metric(metrics, Best.parse(training.best).metric))
            else:
                schedule.step()
        is_best = self.progress.record_metrics(self.cursor.step, metrics)
        if self.cursor.offset == 0:
            self._end_epoch()
        return is_best

    @property
    def evaluation_due(self) -> bool:
        return self.progress.evaluation_due

    @property
    def stop_reason(self) -> str:
        """Why the training is over; empty while it is not."""
        return self.progress.stop_reason(self.cursor)

    def resize_batch(self, batch_size: int) -> None:
        self._source.check_batch_size(batch_size, self.cursor.offset)
        self.batch_size = batch_size

    @property
    def all_graphs(self) -> tuple[StepGraphs | FunctionGraph, ...]:
        return tuple(each for each in (self.graphs, self.function_graph) if each is not None)

    def take_notes(self) -> list[str]:
        return [note for each in self.all_graphs for note in each.take_notes()]

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; tensors are the live ones, as in torch."""
        training = self.training
        model = training.model.state_dict()
        return {
            "schema": 1,
            "made_for": self._signature(),
            "batch_size": self.batch_size,
            "cursor": asdict(self.cursor),
            **self.progress.state_dict(),
            "caveats": list(self.nondeterministic_ops.operations),
            "model": dict(model),
            "unsaved_buffers": {name: value for name, value in training.model.named_buffers() if name not in model},
            "flags": self._flags.changes(),
            "optimizer": training.whole_optimizer.state_dict(),
            "schedule": schedule_state(training),
            **leftover_gradients(training),
            "scale": None if self._scale is None else self._scale.state_dict(),
            "state": {name: thing.state_dict() for name, thing in training.state.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; `CheckpointError` if it belongs to another training."""
        check_compatible(state, self._signature())
        training = self.training
        try:
            training.model.load_state_dict(state["model"])
            self._flags.load(state.get("flags", {}))
            buffers = dict(training.model.named_buffers())
            for name, value in state["unsaved_buffers"].items():
                buffers[name].copy_(value)
            same_tensors = self.update.load_state_dict(state["optimizer"], has_graphs=self.graphs is not None)
            for name, thing in training.state.items():
                thing.load_state_dict(state["state"][name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the state does not fit this training: {error}") from error
        if self.graphs is not None and not same_tensors:
            self.graphs.reset()
        if self.function_graph is not None:
            self.function_graph.expect_changes()
        states = state["schedule"] if isinstance(state["schedule"], list) else [state["schedule"]]
        for schedule, saved in zip(training.schedules, states, strict=False):
            schedule.load_state_dict(saved)
        restore_gradients(training, state)
        if self._scale is not None:
            self._scale.load_state_dict(state["scale"])
        self.batch_size = state["batch_size"]
        self.cursor = Cursor(**state["cursor"])
        self.progress.load_state_dict(state)
        self.nondeterministic_ops.operations[:] = state["caveats"]

    def _signature(self) -> dict[str, Any]:
        """The properties in which the training that loads a state must equal the one that wrote it."""
        training = self.training
        return {
            "seed": self.seed,
            "shards": self.shards,
            "num_samples": training.num_samples,
            "optimizer": " ".join(type(each).__name__ for each in optimizers_of(training.optimizer)),
            "schedule": " ".join(type(each).__name__ for each in training.schedules) or None,
            "scaled": self._scale is not None,
            "state": sorted(training.state),
        }

    def new_graphs(self, capture: GraphCapture, *, tolerant: bool = False) -> StepGraphs:
        operations = self.nondeterministic_ops
        graphs = StepGraphs(self._passes, self.update, self.layout, operations, capture, tolerant=tolerant)
        if has_extra_state(self.training.model):
            graphs.disable(_EXTRA_STATE)
        return graphs

    def new_function_graph(self, capture: GraphCapture, *, tolerant: bool = False) -> FunctionGraph:
        operations = self.nondeterministic_ops
        graph = FunctionGraph(self.training, self._passes.seed, operations, capture, self.device, tolerant=tolerant)
        if has_extra_state(self.training.model):
            graph.disable(_EXTRA_STATE)
        return graph

    def _check_next(self, step: Step) -> None:
        assert step.number == self.cursor.step, f"step {step.number} applied after step {self.cursor.step}"

    def _reproducible(self) -> AbstractContextManager[object]:
        """Collect nondeterministic operations; exact mode on a CPU computes on one thread."""
        if self.shards is None or self.device.type != "cpu":
            return self.nondeterministic_ops.collect()
        stack = ExitStack()
        stack.enter_context(self.nondeterministic_ops.collect())
        stack.enter_context(intra_op_threads(1))
        return stack

    def _prefetch(self, step: Step, pieces: range) -> None:
        batches = self._passes.batches
        if batches.prefetch_depth:
            batches.prefetch(self._source.upcoming(step, pieces, self.batch_size, batches.prefetch_depth))
