"""A recorder that needs no GPU: it does again what was recorded by calling it again."""

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

REPLAYED = "steps are replayed as CUDA graphs, checked bit for bit against the code"


class Echo:
    """Does again what was recorded by calling it again, with the gradients where they were when it was recorded."""

    def __init__(self, training: Training, *, wrong: float = 0.0, has_branches: bool = False) -> None:
        self.has_branches = has_branches
        self._training = training
        self._parameters = list(training.model.parameters())
        self._wrong = wrong  # what a bad recording adds to every gradient
        self.records = self.replays = self.heads = 0

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], None], *, leads: bool = False) -> CapturedGraph:
        self.records += 1
        hung = [parameter.grad for parameter in self._parameters]
        model, optimizer = self._training.model, self._training.optimizer
        state = [
            *self._parameters,
            *model.buffers(),
            *optimizer_tensors(optimizer),
            *(g for g in hung if g is not None),
        ]
        before = copies(state)
        work()
        made = [parameter.grad for parameter in self._parameters]
        copy_tensors([tensor.data for tensor in state], before)  # autograd must not notice

        def replay() -> None:
            self.replays += 1
            for parameter, gradient in zip(self._parameters, hung, strict=True):
                parameter.grad = gradient
            work()
            for parameter, target in zip(self._parameters, made, strict=True):
                if target is not None and parameter.grad is not None and parameter.grad is not target:
                    target.copy_(parameter.grad).add_(self._wrong)
                parameter.grad = None

        def head() -> None:
            self.heads += 1

        if not self.has_branches:
            return CapturedGraph(replay)
        return CapturedGraph(head if leads else no_op, replay)

    def start_over(self) -> None: ...

    def bring(self, value: Tensor, to: Tensor) -> None:
        to.copy_(value)

    def wait(self) -> None: ...


def recorded(training: Training, **options: Any) -> tuple[Trainer, Echo, StepGraphs]:
    trainer = Trainer(training)
    echo = Echo(training, **options)
    trainer.graphs = trainer.recorded_by(echo)
    return trainer, echo, trainer.graphs


def learned(trainer: Trainer) -> tuple[str, list[float], list[float]]:
    losses = [done.loss for done in trainer.steps()]
    remembered = [tensor.double().sum().item() for tensor in optimizer_tensors(trainer.training.optimizer)]
    return digest(trainer.training.model), losses, remembered
