"""A recorder that needs no GPU: it does again what was recorded by calling it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from carpool.runtime.digest import digest
from carpool.runtime.graphs import Graphs
from carpool.runtime.proof import copies, tensors_in
from carpool.runtime.recorder import Replay, nothing
from carpool.runtime.rows import put
from carpool.runtime.trainer import Trainer
from carpool.runtime.training import Training

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

    def record(self, work: Callable[[], None], *, leads: bool = False) -> Replay:
        self.records += 1
        hung = [parameter.grad for parameter in self._parameters]
        model, optimizer = self._training.model, self._training.optimizer
        state = [*self._parameters, *model.buffers(), *tensors_in(optimizer), *(g for g in hung if g is not None)]
        before = copies(state)
        work()
        made = [parameter.grad for parameter in self._parameters]
        put([tensor.data for tensor in state], before)  # autograd must not notice

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
            return Replay(replay)
        return Replay(head if leads else nothing, replay)

    def start_over(self) -> None: ...

    def bring(self, value: Tensor, to: Tensor) -> None:
        to.copy_(value)

    def wait(self) -> None: ...


def recorded(training: Training, **options: Any) -> tuple[Trainer, Echo, Graphs]:
    trainer = Trainer(training)
    echo = Echo(training, **options)
    trainer.graphs = trainer.recorded_by(echo)
    return trainer, echo, trainer.graphs


def learned(trainer: Trainer) -> tuple[str, list[float], list[float]]:
    losses = [done.loss for done in trainer.steps()]
    remembered = [tensor.double().sum().item() for tensor in tensors_in(trainer.training.optimizer)]
    return digest(trainer.training.model), losses, remembered
