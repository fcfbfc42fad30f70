"""What a worker keeps and hands over of its training: checkpoints on disk, and states in memory files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from carpool.runtime.checkpoint import Checkpoints, load
from carpool.runtime.errors import CheckpointError
from carpool.runtime.faults import Faults
from carpool.runtime.mirror import read_mirror, write_mirror
from carpool.runtime.mishap import really
from carpool.runtime.trainer import Trainer


class Keeper:
    """The folder of a job's checkpoints; without one, nothing is kept."""

    def __init__(self, folder: str, keep: int, faults: Faults) -> None:
        self._checkpoints = Checkpoints(Path(folder), keep) if folder else None
        self._faults = faults

    def save(self, trainer: Trainer, *, is_best: bool = False) -> str:
        """Write a checkpoint; its path."""
        if self._checkpoints is None:
            return ""
        step = trainer.cursor.step
        try:
            self._faults.strike_disk(step)
        except OSError as error:
            raise CheckpointError(f"step {step}: the checkpoint was not written: {error.strerror}") from error
        return str(self._checkpoints.save(step, trainer.state_dict(), is_best=is_best))


def publish(trainer: Trainer, fd: int) -> None:
    """Write the state into a memory file."""
    try:
        write_mirror(fd, trainer.cursor.step, trainer.state_dict())
    except OSError as error:
        raise CheckpointError(f"the mirror was not written: {error.strerror}") from error


def take_over(trainer: Trainer, fds: Sequence[int], path: str) -> None:
    """Go on from a state in a memory file, or on disk; `CheckpointError` only where another process would fail too."""
    try:
        trainer.load_state_dict(read_mirror(fds[0])[1] if fds else load(Path(path)))
    except CheckpointError as error:
        if (lost := really(error)) is not error:
            raise lost from None
        raise
