"""`carpool.session`: connects a training loop that the user keeps to the executor.

    with carpool.session(model=model, optimizer=optimizer) as session:
        for batch in session.batches(data, batch_size=64, epochs=20):
            loss = ...                       # forward, backward, optimizer.step(), as ever
            session.report(loss=loss)

Started by carpool as a command job, the program gets a device, waits for its turn between steps where others share the
device, tells how far it is, and keeps checkpoints, from which it goes on bit for bit after it was taken off or killed.
Started by hand, the same program runs as if the session were not there (with ``folder`` it still keeps checkpoints).

A session speaks the messages of protocol.py over a socket that the command inherits: `Joined`, then `Stepped`, `TurnRequested`
and `Saved` at step boundaries, `Done` at the end. To be told to leave is SIGTERM: it saves at the next boundary and
exits.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from carpool.core.errors import InputError
from carpool.runtime.data.batches import Augment, BatchSource
from carpool.runtime.data.sampler import Cursor, Shuffle, StepSampler
from carpool.runtime.engine.determinism import generator_states, restore_generator_states
from carpool.runtime.engine.forward_backward import read_loss
from carpool.runtime.engine.trainer import StepDone
from carpool.runtime.engine.training import Stateful, as_metrics
from carpool.runtime.errors import CheckpointError
from carpool.runtime.process.channel import Channel, Closed
from carpool.runtime.process.protocol import (
    Done,
    Evaluated,
    Grant,
    Joined,
    Message,
    Proceed,
    Save,
    Saved,
    TurnRequested,
    WorkerFailed,
)
from carpool.runtime.state.checkpoint import Checkpoints
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.rate_meter import RateMeter

CHANNEL = "CARPOOL_CHANNEL"  # the variable with the number of the inherited socket
LEFT = 128 + signal.SIGTERM  # exit code of a program that was told to leave and saved before
_LOOK_S = 0.1  # how often somebody who waits for its turn looks whether it is to leave


def session(
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Stateful] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_s: float | None = None,
) -> Session:
    """A session for the loop inside its ``with`` block.

    ``state`` is what else is to survive (a schedule, an EMA …), by name. ``seed`` orders the samples of
    `Session.batches`. ``folder`` keeps checkpoints where the program runs without carpool; under carpool they lie in
    the job's folder. ``checkpoint_s`` are the seconds between them, 60 unless the job says otherwise.
    """
    for name, thing in (state or {}).items():
        if not isinstance(thing, Stateful):
            raise InputError(
                f"session(state={{{name!r}: …}}) is a {type(thing).__name__} without state_dict() and load_state_dict()"
            )
    under = os.environ.get("CARPOOL_FOLDER") if CHANNEL in os.environ else None
    where = under or folder
    every_s = checkpoint_s if checkpoint_s is not None else float(os.environ.get("CARPOOL_CHECKPOINT_S", "60"))
    keep = int(os.environ.get("CARPOOL_KEEP", "2"))
    kept = Checkpoints(Path(where) / "checkpoints", keep) if where else None
    return Session(model, optimizer, dict(state or {}), seed, kept, every_s)


class Session:
    """One loop. What happens between its steps happens here."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Stateful],
        seed: int,
        kept: Checkpoints | None,
        checkpoint_s: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._state = state
        self._seed = seed
        self._checkpoints = kept
        self._checkpoint_s = checkpoint_s
        self._channel = _inherited()
        self._done = 0  # steps
        self._epoch = 0
        self._restored: Any = None  # the generators' states in the checkpoint, until the first step
        self._loss: Tensor | float = math.nan
        self._samples = 0  # in the step at hand
        self._metrics: dict[str, float] = {}
        self._speedometer = RateMeter()
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._by_token = False
        self._granted = 0
        self._leaving = False
        self._handler: Any = None

    @property
    def is_alone(self) -> bool:
        """Whether the program was started by hand, without carpool."""
        return self._channel is None

    def __enter__(self) -> Session:
        if self.model is not None:
            self.model.to(self.device)
        if self._checkpoints is not None:
            self._go_on_from(self._checkpoints)
            if threading.current_thread() is threading.main_thread():
                self._handler = signal.signal(signal.SIGTERM, self._told_to_leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._save()
            self._say(
                Done(
                    step=self._done,
                    epoch=self._epoch,
                    loss=float(self._loss),
                    digest="" if self.model is None else digest(self.model),
                    reason=f"its loop ended after {self._done} steps",
                    metrics=self._metrics,
                )
            )
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # -- the loop -----------------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``; the program's turn, and checkpoints, between them."""
        if type(total) is not int or total < 0:
            raise InputError(f"session.steps({total!r}); it must be a whole number of steps")
        self._join(total)
        if self._restored is not None:
            restore_generator_states(self._restored)
            self._restored = None
        while self._done < total:
            self._boundary()
            try:
                yield self._done
            except GeneratorExit:  # the loop was left in the middle, by `break`
                self._done += 1
                raise
            self._done += 1
            self._granted -= 1
            step = StepDone(self._done, self._epoch, math.nan, self._samples)
            if report := self._speedometer.count(step, self._metrics):
                self._say(replace(report, loss=float(self._loss)))

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int,
        shuffle: bool | Shuffle = True,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Augment | None = None,
    ) -> Iterator[Any]:
        """The batches that are left of so many epochs, on the device: the same ones whoever interrupts.

        The order follows from the session's seed, as in a `carpool.Training`; a last partial batch is kept.
        """
        if not 1 <= batch_size <= len(dataset):
            raise InputError(f"session.batches(batch_size={batch_size!r}); the data holds {len(dataset)} samples")
        order = StepSampler(len(dataset), self._seed, shuffle)
        samples = BatchSource(dataset, seed=self._seed, augment=augment, collate=collate, device=self.device, workers=0)
        per_epoch = -(-len(dataset) // batch_size)
        for step in self.steps(epochs * per_epoch):
            self._epoch, position = divmod(step, per_epoch)
            draw = order.draw(Cursor(step, self._epoch, position * batch_size), batch_size)
            self._samples = len(draw.samples)
            yield samples.fetch(self._epoch, draw.samples, self.device)
            self._epoch = draw.after.epoch

    def step(self, loss: Callable[[nn.Module, Any], Any], batch: Any) -> float | Tensor:
        """Make the step over a batch: gradient of ``loss(model, batch)``, update, report.

        ``loss`` returns what a `carpool.Training`'s does. Today the whole batch is one pass on one device.
        """
        if self.model is None or self.optimizer is None:
            raise InputError("session.step needs the model and the optimizer", way_out="Give both to carpool.session.")
        self.optimizer.zero_grad()
        value, count = read_loss(loss(self.model, batch))
        mean = value if count is None else value / count
        mean.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.report(loss=mean)
        return mean.detach()

    def report(self, *, loss: Tensor | float | None = None, samples: int | None = None, **metrics: float) -> None:
        """Say what came out of the step at hand; a loss on a GPU is fetched only now and then."""
        if loss is not None:
            self._loss = loss.detach() if isinstance(loss, Tensor) else float(loss)
        if samples is not None:
            self._samples = samples
        if metrics:
            self._metrics = as_metrics(metrics)
            self._say(Evaluated(self._done + 1, self._metrics))

    # -- between steps ------------------------------------------------------------------------------------------------

    def _join(self, total: int) -> None:
        if self._channel is None:
            return
        self._say(Joined(self._done, total))
        while not isinstance(self._hear(None), Proceed):
            pass

    def _boundary(self) -> None:
        """What is due before a step."""
        while self._channel is not None and self._channel.poll():
            self._hear(None)
        if not self._leaving and self._by_token and self._granted < 1:
            self._await_turn()
        if self._leaving:
            self._save()
            sys.exit(LEFT)
        if self._checkpoints is not None and time.monotonic() - self._saved_at >= self._checkpoint_s:
            self._save()

    def _await_turn(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the next one is to have the device to itself
        self._granted = 0
        self._say(TurnRequested(self._done))
        while self._by_token and self._granted < 1 and not self._leaving:
            self._hear(_LOOK_S)

    def _hear(self, timeout_s: float | None) -> Message | None:
        assert self._channel is not None
        try:
            received = self._channel.receive(timeout_s)
        except Closed:
            sys.exit(LEFT)  # the executor is gone, and we are about to be
        if received is None:
            return None
        match received.message:
            case Proceed(time_sliced=by_token):
                self._by_token = by_token
            case Grant(steps):
                self._granted = steps
            case Save():
                self._save()
        return received.message

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            with contextlib.suppress(Closed):
                self._channel.send(message)

    def _told_to_leave(self, sign: int, frame: FrameType | None) -> None:
        self._leaving = True

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint; a full disk is told and does not end the training."""
        self._saved_at = time.monotonic()
        if self._checkpoints is None or self._saved_step == self._done:
            return
        try:
            path = self._checkpoints.save(self._done, self._state_dict())
        except CheckpointError as error:
            self._say(WorkerFailed("disk", str(error), self._done))
            warnings.warn(str(error), stacklevel=2)
            return
        self._saved_step = self._done
        self._say(Saved(self._done, str(path)))

    def _state_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "step": self._done,
            "epoch": self._epoch,
            "model": None if self.model is None else dict(self.model.state_dict()),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "state": {name: thing.state_dict() for name, thing in self._state.items()},
            "generators": generator_states(),
        }

    def _go_on_from(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest()
        if found is None:
            return
        for words in found.damaged:
            warnings.warn(words, stacklevel=3)
        state = found.state
        try:
            if self.model is not None:
                self.model.load_state_dict(state["model"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])
            for name, thing in self._state.items():
                thing.load_state_dict(state["state"][name])
            self._done = self._saved_step = state["step"]
            self._epoch, self._restored = state["epoch"], state["generators"]
        except (KeyError, TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{found.path}: the checkpoint does not fit this program: {error}. Remove it to start anew."
            ) from error


def _inherited() -> Channel | None:
    """The socket to the executor, if this program was started by one; whoever comes first has it."""
    number = os.environ.pop(CHANNEL, "")
    if not number:
        return None
    try:
        end = socket.socket(fileno=os.dup(int(number)))
        os.close(int(number))
    except (OSError, ValueError):  # a program in between has closed it
        return None
    return Channel(end)
