"""`carpool.session`: connects a training loop written by the user to the executor.

    with carpool.session(model=model, optimizer=optimizer) as session:
        for batch in session.batches(data, batch_size=64, epochs=20):
            loss = ...                       # forward, backward, optimizer.step() as usual
            session.report(loss=loss)

As a command job of carpool, the program waits for its turn between steps on a shared device, reports progress, and
saves checkpoints, from which it resumes bit for bit after preemption or a kill. Started by hand, the same program runs
without carpool (with ``folder`` it still saves checkpoints).

A session sends the messages of process/protocol.py over an inherited socket: `Joined`, then `Stepped`, `TurnRequested`
and `Saved` at step boundaries, `Done` at the end. On SIGTERM it saves at the next boundary and exits.
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
from carpool.core.typed_fields import MAX_INT, shown
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
from carpool.runtime.state.checkpoint import Checkpoints, FinalSaveRetries
from carpool.runtime.state.digest import digest
from carpool.runtime.worker.rate_meter import RateMeter

CHANNEL = "CARPOOL_CHANNEL"  # environment variable: descriptor of the inherited socket
LEFT = 128 + signal.SIGTERM  # exit code of a preempted program that saved its state
_POLL_S = 0.1  # for SIGTERM, while waiting for a turn
_RETRY_S = 2.0  # between attempts to write the final state


def session(
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state: Mapping[str, Stateful] | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    checkpoint_s: float | None = None,
) -> Session:
    """Open a session for the training loop inside its ``with`` block.

    ``state`` are further objects to checkpoint (a schedule, an EMA …), by name. ``seed`` determines the sample order of
    `Session.batches`. ``folder`` is for checkpoints when the program runs without carpool; under carpool they are in
    the job's folder. ``checkpoint_s`` are the seconds between checkpoints, by default the job's, or 60.
    """
    for name, thing in (state or {}).items():
        if not isinstance(thing, Stateful):
            raise InputError(
                f"session(state={{{name!r}: …}}) is a {type(thing).__name__} without state_dict() and load_state_dict()"
            )
    job_folder = os.environ.get("CARPOOL_FOLDER") if CHANNEL in os.environ else None
    where = job_folder or folder
    every_s = checkpoint_s if checkpoint_s is not None else float(os.environ.get("CARPOOL_CHECKPOINT_S", "60"))
    keep = int(os.environ.get("CARPOOL_KEEP", "2"))
    checkpoints = Checkpoints(Path(where) / "checkpoints", keep) if where else None
    if checkpoints is not None and job_folder:
        checkpoints.hold()
    return Session(model, optimizer, dict(state or {}), seed, checkpoints, every_s)


class Session:
    """The connection of one training loop to the executor."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Stateful],
        seed: int,
        checkpoints: Checkpoints | None,
        checkpoint_s: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._state = state
        self._seed = seed
        self._checkpoints = checkpoints
        self._checkpoint_s = checkpoint_s
        self._channel = _inherited_channel()
        self._steps_done = 0
        self._epoch = 0
        self._restored_rng: Any = None  # generator states of the checkpoint, until the first step
        self._loss: Tensor | float = math.nan
        self._samples = 0  # in the current step
        self._metrics: dict[str, Any] = {}
        self._rate_meter = RateMeter()
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._time_sliced = False
        self._granted_steps = 0
        self._is_leaving = False
        self._previous_handler: Any = None

    @property
    def is_alone(self) -> bool:
        """Whether the program runs without carpool."""
        return self._channel is None

    def __enter__(self) -> Session:
        if self.model is not None:
            self.model.to(self.device)
        if self._checkpoints is not None:
            self._resume_from(self._checkpoints)
            if threading.current_thread() is threading.main_thread():
                self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._save_final()
            self._send(
                Done(
                    step=self._steps_done,
                    epoch=self._epoch,
                    loss=float(self._loss),
                    digest="" if self.model is None else digest(self.model),
                    reason=f"the loop ended after {self._steps_done} steps",
                    metrics=as_metrics(self._metrics, "loss"),
                )
            )
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps of ``total``; turns and checkpoints happen between them."""
        if type(total) is not int or not 0 <= total <= MAX_INT:
            raise InputError(f"session.steps({shown(total)}); it must be a whole number of steps, at most 2**53")
        self._join(total)
        if self._restored_rng is not None:
            restore_generator_states(self._restored_rng)
            self._restored_rng = None
        while self._steps_done < total:
            self._before_step()
            try:
                yield self._steps_done
            except GeneratorExit:  # the loop was left by `break`
                self._steps_done += 1
                raise
            self._steps_done += 1
            self._granted_steps -= 1
            step = StepDone(self._steps_done, self._epoch, math.nan, self._samples)
            if report := self._rate_meter.count(step, lambda: as_metrics(self._metrics, "loss")):
                self._send(replace(report, loss=float(self._loss)))

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
        """Yield the remaining batches of `epochs` epochs, on the device; the same ones after any interruption.

        The order depends on the session's seed, as in a `carpool.Training`; a last partial batch is kept.
        """
        if not 1 <= batch_size <= len(dataset):
            raise InputError(f"session.batches(batch_size={batch_size!r}); the dataset has {len(dataset)} samples")
        sampler = StepSampler(len(dataset), self._seed, shuffle)
        source = BatchSource(dataset, seed=self._seed, augment=augment, collate=collate, device=self.device, workers=0)
        per_epoch = -(-len(dataset) // batch_size)
        for step in self.steps(epochs * per_epoch):
            self._epoch, position = divmod(step, per_epoch)
            draw = sampler.draw(Cursor(step, self._epoch, position * batch_size), batch_size)
            self._samples = len(draw.samples)
            yield source.fetch(self._epoch, draw.samples, self.device)
            self._epoch = draw.after.epoch

    def step(self, loss: Callable[[nn.Module, Any], Any], batch: Any) -> float | Tensor:
        """Run forward, backward and update for a batch, and report the loss.

        ``loss`` returns what a `carpool.Training`'s does. The whole batch is one pass on one device.
        """
        if self.model is None or self.optimizer is None:
            raise InputError("session.step needs a model and an optimizer", way_out="Pass both to carpool.session.")
        self.optimizer.zero_grad()
        parts = read_loss(loss(self.model, batch))
        mean = parts.loss if parts.num_counted is None else parts.loss / parts.num_counted
        mean.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.report(loss=mean)
        self._metrics = {**self._metrics, **parts.metrics}
        return mean.detach()

    def report(self, *, loss: Tensor | float | None = None, samples: int | None = None, **metrics: float) -> None:
        """Report the loss and metrics of the current step; a loss on a GPU is read only for progress reports."""
        if loss is not None:
            self._loss = loss.detach() if isinstance(loss, Tensor) else float(loss)
        if samples is not None:
            self._samples = samples
        if metrics:
            self._metrics = as_metrics(metrics)
            self._send(Evaluated(self._steps_done + 1, self._metrics))

    def _join(self, total: int) -> None:
        if self._channel is None:
            return
        self._send(Joined(self._steps_done, total))
        while not isinstance(self._handle_next(None), Proceed):
            pass

    def _before_step(self) -> None:
        while self._channel is not None and self._channel.poll():
            self._handle_next(None)
        if not self._is_leaving and self._time_sliced and self._granted_steps < 1:
            self._await_turn()
        if self._is_leaving:
            self._save()
            sys.exit(LEFT)
        if self._checkpoints is not None and time.monotonic() - self._saved_at >= self._checkpoint_s:
            self._save()

    def _await_turn(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the next job gets an idle device
        self._granted_steps = 0
        self._send(TurnRequested(self._steps_done))
        while self._time_sliced and self._granted_steps < 1 and not self._is_leaving:
            self._handle_next(_POLL_S)

    def _handle_next(self, timeout_s: float | None) -> Message | None:
        assert self._channel is not None
        try:
            received = self._channel.receive(timeout_s)
        except Closed:
            sys.exit(LEFT)  # the executor has exited
        if received is None:
            return None
        match received.message:
            case Proceed(time_sliced=time_sliced):
                self._time_sliced = time_sliced
            case Grant(steps):
                self._granted_steps = steps
            case Save():
                self._save()
        return received.message

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            with contextlib.suppress(Closed):
                self._channel.send(message)

    def _on_sigterm(self, sign: int, frame: FrameType | None) -> None:
        self._is_leaving = True

    def _save_final(self) -> None:
        """Write the final state; on a full disk, wait: a program whose state is not on disk has not finished."""
        error, retries = self._save(), FinalSaveRetries()
        while error is not None:
            if self._channel is None or retries.is_exhausted(error):
                raise error
            self._handle_next(_RETRY_S)
            if self._is_leaving:
                sys.exit(LEFT)
            error = self._save(quietly=True)

    def _save(self, *, quietly: bool = False) -> CheckpointError | None:
        """Write a checkpoint; a failed write is reported and does not end the training."""
        self._saved_at = time.monotonic()
        if self._checkpoints is None or self._saved_step == self._steps_done:
            return None
        try:
            path = self._checkpoints.save(self._steps_done, self._state_dict())
        except CheckpointError as error:
            if not quietly:
                self._send(WorkerFailed("disk", str(error), self._steps_done))
                warnings.warn(str(error), stacklevel=2)
            return error
        self._saved_step = self._steps_done
        self._send(Saved(self._steps_done, str(path)))
        return None

    def _state_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "step": self._steps_done,
            "epoch": self._epoch,
            "model": None if self.model is None else dict(self.model.state_dict()),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "state": {name: thing.state_dict() for name, thing in self._state.items()},
            "generators": generator_states(),
        }

    def _resume_from(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.latest()
        if found is None:
            return
        for error in found.damaged:
            warnings.warn(error, stacklevel=3)
        state = found.state
        try:
            if self.model is not None:
                self.model.load_state_dict(state["model"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])
            for name, thing in self._state.items():
                thing.load_state_dict(state["state"][name])
            self._steps_done = self._saved_step = state["step"]
            self._epoch, self._restored_rng = state["epoch"], state["generators"]
        except (KeyError, TypeError, RuntimeError, ValueError, AttributeError) as mismatch:
            raise CheckpointError(
                f"{found.path}: the checkpoint does not fit this program: {mismatch}. Delete it to start over."
            ) from mismatch


def _inherited_channel() -> Channel | None:
    """The socket to the executor, if this program runs under carpool; only the first session gets it."""
    number = os.environ.pop(CHANNEL, "")
    if not number:
        return None
    try:
        end = socket.socket(fileno=os.dup(int(number)))
        os.close(int(number))
    except (OSError, ValueError):  # closed by a wrapper program
        return None
    return Channel(end)
