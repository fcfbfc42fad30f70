"""State I/O of a worker: saves checkpoints, loads a state, runs warm-up steps before taking over."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError
from carpool.runtime.memory.memory_usage import has_free_memory, release_memory
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Load, Message, Noted, WorkerFailed
from carpool.runtime.state.checkpoint import Checkpoints, load, load_copy
from carpool.runtime.state.mirror import read_mirror
from carpool.runtime.worker.error_classifier import failure_message, is_device_fault, root_cause
from carpool.runtime.worker.fault_injection import FaultInjector

_MAX_WARMUP_STEPS = 6  # one eager, two to verify each graph of pass and update, one replayed
_MIN_WARMUP_STEPS = 2


def run_warmup_steps(trainer: Trainer, is_interrupted: Callable[[], bool]) -> str:
    """Run steps until later ones would not be faster, or a message arrives; returns a note for the job's story.

    Kernels are loaded, and graphs captured and verified; they stay valid when the state is reloaded, because it is
    copied in place. The trainer's state is worthless afterwards. User hooks and evaluations are not called. A failing
    step ends the warm-up without an error, because it will fail again in training; only a lost GPU raises.
    """
    began, count = time.perf_counter(), 0
    try:
        is_done = False
        while count < _MAX_WARMUP_STEPS and not (is_done or is_interrupted()):
            is_replayed = all(graphs.is_warmed_up for graphs in trainer.all_graphs)
            step = trainer.next_step()
            trainer.compute(step)
            trainer.cursor = step.draw.after
            count += 1
            is_done = is_replayed and count >= _MIN_WARMUP_STEPS
        trainer.synchronize()
    except Exception as raised:
        error = root_cause(raised)
        if is_device_fault(error):
            raise error from raised
        traceback.print_exc()
        release_memory(trainer)
        return f"warm-up failed at step {count + 1}: {error}"
    return f"warmed up with {count} steps in {time.perf_counter() - began:.2f} s"


class StateIO:
    """Saves and loads a trainer's state; a failed write is reported and does not end the training."""

    def __init__(
        self,
        trainer: Trainer,
        swap: SwapClient,
        send: Callable[[Message], None],
        checkpoints: Checkpoints | None,
        faults: FaultInjector,
    ) -> None:
        self._trainer = trainer
        self._swap = swap
        self._send = send
        self._checkpoints = checkpoints  # None: nothing is saved
        self._faults = faults
        self.error: OSError | CheckpointError | None = None  # of the last save, if it failed

    def save(self, *, is_best: bool = False, quietly: bool = False) -> str | None:
        """Write a checkpoint; returns its path, "" if checkpoints are off, or None if writing failed.

        A failure is reported unless it already was (`quietly`).
        """
        if self._checkpoints is None:
            return ""
        step = self._trainer.cursor.step
        self.error = None
        try:
            self._faults.inject_in_save(step)
            with self._swap.readable():
                return str(self._checkpoints.save(step, self._trainer.state_dict(), is_best=is_best))
        except OSError as error:
            self.error = error
            failed = WorkerFailed("disk", f"step {step}: cannot write the checkpoint: {error.strerror}", step)
        except CheckpointError as error:
            self.error = error
            failed = failure_message(error, step)
        if not quietly:
            self._send(failed)
        return None

    def load(self, order: Load, fds: Sequence[int], is_interrupted: Callable[[], bool]) -> None:
        """Load a state, after warm-up steps with it if they were ordered and memory is free."""
        self._swap.leave_region()
        _load_state(self._trainer, fds, order.path)
        if order.warmup_bytes and self._swap.is_disabled and has_free_memory(self._trainer.device, order.warmup_bytes):
            self._send(Noted(run_warmup_steps(self._trainer, is_interrupted)))
            _load_state(self._trainer, fds, order.path)


def _load_state(trainer: Trainer, fds: Sequence[int], path: str) -> None:
    """Load a mirror or a checkpoint; `CheckpointError` only if another process would fail too."""
    try:
        trainer.load_state_dict(_read_state(fds, path))
    except CheckpointError as error:
        if (cause := root_cause(error)) is not error:
            raise cause from None
        raise


def _read_state(fds: Sequence[int], path: str) -> Any:
    if not fds:
        return load(Path(path))
    return load_copy(fds[0], path) if path else read_mirror(fds[0])[1]
