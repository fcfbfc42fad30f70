"""A `GraphCapture` without a GPU: a replay calls the captured function again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from carpool.runtime.engine.flat_buffers import copy_tensors
from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.engine.training import Training
from carpool.runtime.graphs.capture import CapturedGraph, no_op
from carpool.runtime.graphs.step_graphs import StepGraphs
from carpool.runtime.graphs.verification import copies, optimizer_tensors
from carpool.runtime.state.digest import digest

REPLAYED = "steps are replayed as CUDA graphs, verified bit for bit against eager steps"


class FakeCapture:
    """Replays by calling the function again, with gradients in the tensors they had at capture."""

    def __init__(self, training: Training, *, error: float = 0.0, has_branches: bool = False) -> None:
        self.has_branches = has_branches
        self._training = training
        self._parameters = list(training.model.parameters())
        self._error = error  # added to every gradient by a wrong graph
        self.captures = self.replays = self.heads = 0

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None], *, starts_step: bool = False) -> CapturedGraph:
        self.captures += 1
        gradients = [parameter.grad for parameter in self._parameters]
        model, optimizer = self._training.model, self._training.whole_optimizer
        state = [
            *self._parameters,
            *model.buffers(),
            *optimizer_tensors(optimizer),
            *(g for g in gradients if g is not None),
        ]
        before = copies(state)
        work()
        made = [parameter.grad for parameter in self._parameters]
        copy_tensors([tensor.data for tensor in state], before)  # .data, so that autograd does not see the copy

        def replay() -> None:
            self.replays += 1
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            work()
            for parameter, target in zip(self._parameters, made, strict=True):
                if target is not None and parameter.grad is not None and parameter.grad is not target:
                    target.copy_(parameter.grad).add_(self._error)
                parameter.grad = None

        def head() -> None:
            self.heads += 1

        if not self.has_branches:
            return CapturedGraph(replay)
        return CapturedGraph(head if starts_step else no_op, replay)

    def reset(self) -> None: ...

    def copy_to_host(self, value: Tensor, target: Tensor) -> None:
        target.copy_(value)

    def wait_for_copy(self) -> None: ...


def with_graphs(training: Training, **options: Any) -> tuple[Trainer, FakeCapture, StepGraphs]:
    trainer = Trainer(training)
    capture = FakeCapture(training, **options)
    trainer.graphs = trainer.new_graphs(capture)
    return trainer, capture, trainer.graphs


def train(trainer: Trainer) -> tuple[str, list[float], list[float]]:
    """Digest, losses and sums of the optimizer's state after a whole training."""
    losses = [done.loss for done in trainer.steps()]
    state = [tensor.double().sum().item() for tensor in optimizer_tensors(trainer.training.whole_optimizer)]
    return digest(trainer.training.model), losses, state
