"""What a worker keeps of its training on disk, and how it takes a state over from there or from a memory file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.runtime.checkpoint import Checkpoints, load
from carpool.runtime.errors import CheckpointError
from carpool.runtime.faults import Faults
from carpool.runtime.lodger import Lodger
from carpool.runtime.mirror import read_mirror
from carpool.runtime.mishap import broke, really
from carpool.runtime.protocol import Broke, Load, Message, Noted
from carpool.runtime.rehearsal import rehearse
from carpool.runtime.room import has_free
from carpool.runtime.trainer import Trainer


class Keeper:
    """Keeps a trainer's state; what cannot be written is told, and does not end the training."""

    def __init__(
        self,
        trainer: Trainer,
        lodger: Lodger,
        say: Callable[[Message], None],
        checkpoints: Checkpoints | None,
        faults: Faults,
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
            self._say(Broke("disk", f"step {step}: the checkpoint was not written: {error.strerror}", step))
        except CheckpointError as error:
            self._say(broke(error, step))
        return None

    def take_over(self, said: Load, fds: Sequence[int], is_called: Callable[[], bool]) -> None:
        """Go on from a state, after a rehearsal with it where that was said and memory allows it."""
        self._lodger.unsettle()
        _take_over(self._trainer, fds, said.path)
        if said.rehearses and self._lodger.stays and has_free(self._trainer.device, said.rehearses):
            self._say(Noted(rehearse(self._trainer, is_called)))
            _take_over(self._trainer, fds, said.path)


def _take_over(trainer: Trainer, fds: Sequence[int], path: str) -> None:
    """Go on from a state in a memory file, or on disk; `CheckpointError` only where another process would fail too."""
    try:
        trainer.load_state_dict(read_mirror(fds[0])[1] if fds else load(Path(path)))
    except CheckpointError as error:
        if (lost := really(error)) is not error:
            raise lost from None
        raise
