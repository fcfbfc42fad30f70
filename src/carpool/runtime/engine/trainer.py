"""Trainer: runs a training step by step, resumable, with steps that several processes can share."""

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
    PassObserver,
    Step,
    add_contributions,
)
from carpool.runtime.engine.optimizer_step import LossScale, OptimizerStep
from carpool.runtime.engine.progress import Progress, divergence_error, finite_sums
from carpool.runtime.engine.step_source import StepSource
from carpool.runtime.engine.stop_criteria import Best, metric
from carpool.runtime.engine.training import Training, as_metrics
from carpool.runtime.errors import CheckpointError
from carpool.runtime.graphs.capture import CudaGraphCapture, GraphCapture
from carpool.runtime.graphs.step_graphs import StepGraphs
from carpool.runtime.reduce.shards import (
    Limits,
    check_shards,
    most_samples,
    root,
    tree_sum,
)


def state_signature(training: Training, *, seed: int, shards: int | None, scaled: bool) -> dict[str, Any]:
    """What a state of a training says of it."""
    return {
        "seed": seed,
        "shards": shards,
        "num_samples": training.num_samples,
        "optimizer": type(training.optimizer).__name__,
        "schedule": None if training.schedule is None else type(training.schedule).__name__,
        "scaled": scaled,
        "state": sorted(training.state),
    }


def check_state(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a state of another version of carpool, or of another training than is wanted."""
    schema = state.get("schema")
    if schema != 1:
        raise CheckpointError(f"the state has schema {schema!r}; this version of carpool reads 1")
    for name, here in wanted.items():
        there = state["made_for"].get(name)
        if there != here:
            raise CheckpointError(
                f"the state was made with {name} {there!r}; this training has {here!r}. "
                "Resume with the same, or start anew."
            )


# One process calls `step`. Several processes each hold a `Trainer` of the same training and do what `step` does, with
# their own exchange in the middle:
#
#     step = trainer.begin(parts)                        # the same everywhere
#     mine = trainer.contribute(step, range of pieces)   # leaves the trainer as it was, so it can be repeated
#     total = …                                          # all contributions added in tree order (shards.py)
#     sums = trainer.apply(step, total, parameters)      # new weights, for all parameters or for a range of them
#     done = trainer.advance(step, sums)                 # counters, schedule, after_update: once all weights are in place
#     if trainer.evaluation_due: trainer.record(trainer.evaluate())


_AS_IT_IS = nullcontext()

DEFAULT_SHARDS = 8


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step that has been made."""

    step: int  # steps done, this one included
    epoch: int  # epochs done
    loss: float  # mean over the step
    num_samples: int
    skipped: bool = False  # a float16 gradient overflowed: the weights stayed as they were


class Trainer:
    """Everything about a training that changes while it runs, on one device."""

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
        self.limits: Limits = ()  # on the samples of a pass, where more did not fit into memory
        self.cursor = Cursor()
        self.progress = Progress(training)
        self.notes = enable_determinism(
            deterministic=deterministic
        )  # freedoms that torch could not be denied, for the job's story
        self.caveats = NondeterministicOps()  # operations without a deterministic form, for the job's story
        self._source = StepSource(training, seed, self.shards)
        self._source.check(self.batch_size, self.cursor.offset)
        place_training(training, self.device)
        self._scale = LossScale() if training.autocast_dtype is torch.float16 else None
        self.layout = FlatLayout(training.model, training.optimizer)
        self._passes = ForwardBackward(training, self.layout, seed, self._scale)
        self.notes += self._passes.samples.notes
        self.update = OptimizerStep(training, self.layout, self._scale)
        self.graphs: StepGraphs | None = None  # on a GPU, steps become CUDA graphs by themselves
        if graph and self.device.type == "cuda":
            self.graphs = self.recorded_by(CudaGraphCapture(self.device), loosely=not deterministic)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, parts: tuple[int, ...] = ()) -> StepDone:
        """Make the next step alone, all its pieces one after another, and evaluate if that is due."""
        step = self.begin(parts)
        done = self.advance(step, self.make(step))
        if self.evaluation_due:
            self.record(self.evaluate())
        return done

    def make(self, step: Step) -> StepSums:
        """New weights from all pieces of a step; it is not counted yet."""
        if self.is_whole(step):
            return self.apply_whole(step, self.pass_whole(step))
        return self.apply(step, self.combine(step, self.contribute(step, range(len(step.bounds)))))

    def steps(self) -> Iterator[StepDone]:
        """Make steps until the training is over."""
        while not self.stopped:
            yield self.step()

    def begin(self, parts: tuple[int, ...] = ()) -> Step:
        """The next step: which samples, and how cut. ``parts`` (default mode) are samples per device."""
        return self._source.step(self.cursor, self.batch_size, parts, most_samples(self.limits, self.cursor.step))

    def contribute(self, step: Step, pieces: range, places: ContributionSlots | None = None) -> Contributions:
        """What a range of pieces contributes, as maximal aligned subtrees; the trainer stays as it was."""
        self._look_ahead(step, pieces)
        with self._bound():
            return self._passes.contribute(step, pieces, places)

    def combine(self, step: Step, gathered: Contributions) -> Contribution:
        """Add contributions of any owners, in tree order."""
        with self._bound():
            total = tree_sum(gathered, root(len(step.bounds)), add_contributions)
        assert total is not None, "a step has samples"
        return total

    def apply(self, step: Step, total: Contribution, parameters: Collection[int] | None = None) -> StepSums:
        """Update the weights of some of the layout's parameters (by default all) and the buffers.

        ``total`` is only read: it may lie in memory that others read too. A step that is cut into parts rounds unlike
        one that is not, so its optimizer may round as it likes; one on a single device rounds as in anybody's loop.
        """
        assert step.number == self.cursor.step, f"step {step.number} comes after step {self.cursor.step}"
        with self._bound():
            sums = finite_sums(step, total, self.layout, self._scale, self.progress)
            self.update.load_buffers(total)
            self.update.settle(fused=self.shards is None and len(step.bounds) > 1)
            if sums.finite:
                self.update.load_gradients(total, sums)
                if self.shards is not None and self.shards > 1:
                    seed_update(self.seed, step.number)
                self.update.apply(parameters)
        return sums

    def is_whole(self, step: Step) -> bool:
        """Whether a process that is alone may make the step in one pass, without adding anything up."""
        return len(step.bounds) == 1 and not 0 < step.most < step.num_samples and self._scale is None

    def pass_whole(self, step: Step, turn: PassObserver | None = None) -> float:
        """The loss of a step in one pass, its gradient on the parameters; what fails can be repeated."""
        self._passes.turn = turn
        self._look_ahead(step, range(1))
        with self._bound():
            if self.graphs is not None:
                return self.graphs.make_pass(step)
            self._passes.starts()
            return self._passes.whole(self._passes.fetch(step), step.number)

    def apply_whole(self, step: Step, loss: float, then: Callable[[], object] | None = None) -> StepSums:
        """Update the weights from the gradient that `pass_whole` left.

        Only the loss is checked for being a number: a gradient that is none shows in the loss of the next step, and
        looking at every element of it costs more than all else that is done here. ``then`` is called as soon as the
        device has been told all of the step, where nothing of the training's own comes before the next one.
        """
        assert step.number == self.cursor.step, f"step {step.number} comes after step {self.cursor.step}"
        with self._bound():
            if not math.isfinite(loss):
                raise divergence_error(step, loss, self.progress)
            self.update.settle(fused=False)
            make = self.update.make if self.graphs is None else self.graphs.make_update
            make(then if self.progress.ends_with_update(step.draw, loss) else None)
        return StepSums([], loss, finite=True, counted=False)

    def advance(self, step: Step, sums: StepSums) -> StepDone:
        """Count the step, once all weights are updated."""
        training = self.training
        self.cursor = step.draw.after
        if self._scale is not None:
            self._scale.passed() if sums.finite else self._scale.overflowed()
        if sums.finite:
            every = training.schedule_every
            if training.schedule is not None and (every == "step" or (every == "epoch" and step.draw.ends_epoch)):
                training.schedule.step()
            if training.after_update is not None:
                with self._bound() if self.shards is not None else _AS_IT_IS:
                    training.after_update(training.model, self.cursor.step)
        self.progress.stepped(step.draw, sums.loss)
        return StepDone(self.cursor.step, self.cursor.epoch, sums.loss, step.num_samples, not sums.finite)

    def await_device(self) -> None:
        """Return when the device has made all that was launched on it: a GPU may still be at the last step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- evaluation and end -------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Ask the training's own ``evaluate`` for metrics, with the model in eval mode; changes nothing."""
        assert self.training.evaluate is not None, "there is nothing to evaluate with"
        model = self.training.model
        modes = [(module, module.training) for module in model.modules()]
        seed_evaluation(self.seed, self.cursor.step)
        model.eval()
        try:
            with self._bound(), torch.no_grad():
                return as_metrics(self.training.evaluate(model))
        finally:
            for module, mode in modes:
                module.training = mode

    def record(self, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of this step; whether they are the best so far."""
        training = self.training
        if training.schedule is not None and training.schedule_every == "evaluation":
            if isinstance(training.schedule, ReduceLROnPlateau):
                training.schedule.step(metric(metrics, Best.parse(training.best).metric))
            else:
                training.schedule.step()
        return self.progress.evaluated(self.cursor.step, metrics)

    @property
    def evaluation_due(self) -> bool:
        """Whether the model is to be evaluated before the next step."""
        return self.progress.evaluation_due

    @property
    def stopped(self) -> str:
        """Why the training is over, in words; empty while it is not."""
        return self.progress.why_over(self.cursor)

    def resize_batch(self, batch_size: int) -> None:
        """Hold this many samples per step from the next one on; refused where there are less, or shards too small."""
        self._source.check(batch_size, self.cursor.offset)
        self.batch_size = batch_size

    def take_news(self) -> list[str]:
        """What was found out about its steps since the last time, for the job's story."""
        return [] if self.graphs is None else self.graphs.take_news()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs; tensors are the live ones, as in torch, so copy what must outlast the next step."""
        training = self.training
        model = training.model.state_dict()
        return {
            "schema": 1,
            "made_for": self._made_for(),
            "batch_size": self.batch_size,
            "cursor": asdict(self.cursor),
            **self.progress.state_dict(),
            "caveats": list(self.caveats.operations),
            "model": dict(model),
            "unsaved_buffers": {name: value for name, value in training.model.named_buffers() if name not in model},
            "optimizer": training.optimizer.state_dict(),
            "schedule": None if training.schedule is None else training.schedule.state_dict(),
            "scale": None if self._scale is None else self._scale.state_dict(),
            "state": {name: thing.state_dict() for name, thing in training.state.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken."""
        check_state(state, self._made_for())
        training = self.training
        try:
            training.model.load_state_dict(state["model"])
            buffers = dict(training.model.named_buffers())
            for name, value in state["unsaved_buffers"].items():
                buffers[name].copy_(value)
            is_same = self.update.load(state["optimizer"])
            for name, thing in training.state.items():
                thing.load_state_dict(state["state"][name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"the state does not fit this training: {error}") from error
        if self.graphs is not None and not is_same:
            self.graphs.forget()  # the optimizer remembers in other tensors now
        if training.schedule is not None:
            training.schedule.load_state_dict(state["schedule"])
        if self._scale is not None:
            self._scale.load_state_dict(state["scale"])
        self.batch_size = state["batch_size"]
        self.cursor = Cursor(**state["cursor"])
        self.progress.load_state_dict(state)
        self.caveats.operations[:] = state["caveats"]

    def _made_for(self) -> dict[str, Any]:
        return state_signature(self.training, seed=self.seed, shards=self.shards, scaled=self._scale is not None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def recorded_by(self, recorder: GraphCapture, *, loosely: bool = False) -> StepGraphs:
        """Graphs of this training's steps, made by a recorder."""
        return StepGraphs(self._passes, self.update, self.layout, self.caveats, recorder, loosely=loosely)

    def _bound(self) -> AbstractContextManager[object]:
        """Compute so that bits can be kept: what has no deterministic form is noted; exact on CPU means one thread."""
        if self.shards is None or self.device.type != "cpu":
            return self.caveats.watching()
        stack = ExitStack()
        stack.enter_context(self.caveats.watching())
        stack.enter_context(intra_op_threads(1))
        return stack

    def _look_ahead(self, step: Step, pieces: range) -> None:
        """Let the batches of this step and the next ones be prepared."""
        samples = self._passes.samples
        if samples.depth:
            samples.expect(self._source.ahead(step, pieces, self.batch_size, samples.depth))
