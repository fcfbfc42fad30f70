"""State I/O of a worker: saves checkpoints, loads a state, runs warm-up steps before taking over.

What is slow about the first steps of a process happens then: kernels are loaded, and the step is recorded and proven.
All of it stays when the state is loaded anew, because that is copied to where it was. Neither the user's own hooks nor
evaluations are called: nobody shall see such a step.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.runtime.engine.trainer import Trainer
from carpool.runtime.errors import CheckpointError
from carpool.runtime.memory.memory_usage import has_free_memory, release_memory
from carpool.runtime.memory.swap_client import SwapClient
from carpool.runtime.process.protocol import Load, Message, Noted, WorkerFailed
from carpool.runtime.state.checkpoint import Checkpoints, load
from carpool.runtime.state.mirror import read_mirror
from carpool.runtime.worker.error_classifier import broke_message, is_device_fault, root_cause
from carpool.runtime.worker.fault_injection import FaultInjector

_MOST = 6  # steps: one by the code, those that prove recordings of the pass and of the update, and one replayed
_FEWEST = 2


def run_warmup_steps(trainer: Trainer, is_called: Callable[[], bool]) -> str:
    """Make steps until none would be slower than the later ones, or something is said; what was done, in words.

    The trainer is left in a state that is worth nothing. A step that fails here ends the rehearsal and is told when it
    fails again in earnest; only a lost GPU is told now.
    """
    began, count = time.perf_counter(), 0
    try:
        is_through = False
        while count < _MOST and not (is_through or is_called()):
            is_replayed = trainer.graphs is None or trainer.graphs.is_settled
            step = trainer.begin()
            trainer.make(step)
            trainer.cursor = step.draw.after
            count += 1
            is_through = is_replayed and count >= _FEWEST
        trainer.await_device()
    except Exception as raised:
        error = root_cause(raised)
        if is_device_fault(error):
            raise error from raised
        traceback.print_exc()
        release_memory(trainer)
        return f"a rehearsal ended at step {count + 1}: {error}"
    return f"rehearsed {count} steps in {time.perf_counter() - began:.2f} s"


class StateIO:
    """Keeps a trainer's state; what cannot be written is told, and does not end the training."""

    def __init__(
        self,
        trainer: Trainer,
        lodger: SwapClient,
        say: Callable[[Message], None],
        checkpoints: Checkpoints | None,
        faults: FaultInjector,
    ) -> None:
        self._trainer = trainer
        self._lodger = lodger
        self._say = say
        self._checkpoints = checkpoints  # None: nothing is kept on disk
        self._faults = faults

    def save(self, *, is_best: bool = False) -> str | None:
        """Write a checkpoint; its path, empty where none is kept, or nothing if it could not be written."""
        if self._checkpoints is None:
            return ""
        step = self._trainer.cursor.step
        try:
            self._faults.strike_disk(step)
            with self._lodger.readable():
                return str(self._checkpoints.save(step, self._trainer.state_dict(), is_best=is_best))
        except OSError as error:
            self._say(WorkerFailed("disk", f"step {step}: the checkpoint was not written: {error.strerror}", step))
        except CheckpointError as error:
            self._say(broke_message(error, step))
        return None

    def take_over(self, said: Load, fds: Sequence[int], is_called: Callable[[], bool]) -> None:
        """Go on from a state, after a rehearsal with it where that was said and memory allows it."""
        self._lodger.unsettle()
        _take_over(self._trainer, fds, said.path)
        if said.warmup_bytes and self._lodger.stays and has_free_memory(self._trainer.device, said.warmup_bytes):
            self._say(Noted(run_warmup_steps(self._trainer, is_called)))
            _take_over(self._trainer, fds, said.path)


def _take_over(trainer: Trainer, fds: Sequence[int], path: str) -> None:
    """Go on from a state in a memory file, or on disk; `CheckpointError` only where another process would fail too."""
    try:
        trainer.load_state_dict(read_mirror(fds[0])[1] if fds else load(Path(path)))
    except CheckpointError as error:
        if (lost := root_cause(error)) is not error:
            raise lost from None
        raise
