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
from torch.optim.lr_scheduler import ReduceLROnPlateau

from carpool.runtime.data.sampler import Cursor
from carpool.runtime.engine.determinism import (
    NondeterministicOps,
    enable_determinism,
    intra_op_threads,
    seed_evaluation,
    seed_update,
)
from carpool.runtime.engine.device_setup import place_training
from carpool.runtime.engine.flat_buffers import Contribution, FlatLayout, StepSums
from carpool.runtime.engine.forward_backward import (
    Contributions,
    ContributionSlots,
    ForwardBackward,
    LaunchObserver,
    Step,
    add_contributions,
)
from carpool.runtime.engine.optimizer_step import LossScale, OptimizerStep
from carpool.runtime.engine.progress import Progress, divergence_error, read_finite_sums
from carpool.runtime.engine.step_source import StepSource
from carpool.runtime.engine.stop_criteria import Best, metric
from carpool.runtime.engine.training import Training, as_metrics
from carpool.runtime.errors import CheckpointError
from carpool.runtime.graphs.capture import CudaGraphCapture, GraphCapture
from carpool.runtime.graphs.step_graphs import StepGraphs
from carpool.runtime.reduce.shards import (
    MicroBatchLimits,
    check_shards,
    max_micro_batch,
    root,
    tree_sum,
)

DEFAULT_SHARDS = 8


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
        self.layout = FlatLayout(training.model, training.optimizer)
        self._passes = ForwardBackward(training, self.layout, seed, self._scale)
        self.notes += self._passes.batches.notes
        self.update = OptimizerStep(training, self.layout, self._scale)
        self.graphs: StepGraphs | None = None  # CUDA only
        if graph and self.device.type == "cuda":
            self.graphs = self.new_graphs(CudaGraphCapture(self.device), tolerant=not deterministic)

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
        limit = max_micro_batch(self.limits, self.cursor.step)
        return self._source.step_at(self.cursor, self.batch_size, parts, limit)

    def compute(self, step: Step) -> StepSums:
        """Update the weights from all pieces of a step; `advance` counts it."""
        if self.is_single_pass(step):
            return self.apply_single_pass(step, self.single_pass(step))
        return self.apply(step, self.combine(step, self.contribute(step, range(len(step.bounds)))))

    def contribute(self, step: Step, pieces: range, slots: ContributionSlots | None = None) -> Contributions:
        self._prefetch(step, pieces)
        with self._reproducible():
            return self._passes.contribute(step, pieces, slots)

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

    def single_pass(self, step: Step, observer: LaunchObserver | None = None) -> float:
        """Run forward and backward of the whole step: returns the loss, leaves gradients on the parameters."""
        self._passes.observer = observer
        self._prefetch(step, range(1))
        with self._reproducible():
            if self.graphs is not None:
                return self.graphs.forward_backward(step)
            self._passes.before_launch()
            return self._passes.single_pass(self._passes.fetch_batch(step), step.number)

    def apply_single_pass(self, step: Step, loss: float, on_launched: Callable[[], object] | None = None) -> StepSums:
        """Update the weights from the gradients that `single_pass` left.

        Only the loss is checked for being finite: a non-finite gradient shows in the next loss, and checking all its
        elements would cost more than the rest of this method. ``on_launched`` is called once the update is launched, if
        no user code runs before the next step.
        """
        self._check_next(step)
        with self._reproducible():
            if not math.isfinite(loss):
                raise divergence_error(step, loss, self.progress)
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
            if training.schedule is not None and (every == "step" or (every == "epoch" and step.draw.ends_epoch)):
                training.schedule.step()
            if training.after_update is not None:
                with self._reproducible() if self.shards is not None else nullcontext():
                    training.after_update(training.model, self.cursor.step)
        self.progress.record_step(step.draw, sums.loss)
        return StepDone(self.cursor.step, self.cursor.epoch, sums.loss, step.num_samples, not sums.finite)

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
        if training.schedule is not None and training.schedule_every == "evaluation":
            if isinstance(training.schedule, ReduceLROnPlateau):
                training.schedule.step(metric(metrics, Best.parse(training.best).metric))
            else:
                training.schedule.step()
        return self.progress.record_metrics(self.cursor.step, metrics)

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

    def take_notes(self) -> list[str]:
        return [] if self.graphs is None else self.graphs.take_notes()

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
            "optimizer": training.optimizer.state_dict(),
            "schedule": None if training.schedule is None else training.schedule.state_dict(),
            "scale": None if self._scale is None else self._scale.state_dict(),
            "state": {name: thing.state_dict() for name, thing in training.state.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; `CheckpointError` if it belongs to another training."""
        _check_compatible(state, self._signature())
        training = self.training
        try:
            training.model.load_state_dict(state["model"])
            buffers = dict(training.model.named_buffers())
            for name, value in state["unsaved_buffers"].items():
                buffers[name].copy_(value)
            same_tensors = self.update.load_state_dict(state["optimizer"])
            for name, thing in training.state.items():
                thing.load_state_dict(state["state"][name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the state does not fit this training: {error}") from error
        if self.graphs is not None and not same_tensors:
            self.graphs.reset()
        if training.schedule is not None:
            training.schedule.load_state_dict(state["schedule"])
        if self._scale is not None:
            self._scale.load_state_dict(state["scale"])
        self.batch_size = state["batch_size"]
        self.cursor = Cursor(**state["cursor"])
        self.progress.load_state_dict(state)
        self.nondeterministic_ops.operations[:] = state["caveats"]

    def _signature(self) -> dict[str, Any]:
        """What must be equal in the training that wrote a state and the one that loads it."""
        training = self.training
        return {
            "seed": self.seed,
            "shards": self.shards,
            "num_samples": training.num_samples,
            "optimizer": type(training.optimizer).__name__,
            "schedule": None if training.schedule is None else type(training.schedule).__name__,
            "scaled": self._scale is not None,
            "state": sorted(training.state),
        }

    def new_graphs(self, capture: GraphCapture, *, tolerant: bool = False) -> StepGraphs:
        return StepGraphs(self._passes, self.update, self.layout, self.nondeterministic_ops, capture, tolerant=tolerant)

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


def _check_compatible(state: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
    """Reject a state of another version of carpool or of another training."""
    schema = state.get("schema")
    if schema != 1:
        raise CheckpointError(f"the state has schema {schema!r}; this version of carpool reads 1")
    for name, expected in signature.items():
        found = state["made_for"].get(name)
        if found != expected:
            raise CheckpointError(
                f"the state was saved with {name} {found!r}; this training has {expected!r}. "
                "Resume with the same value, or start over."
            )
