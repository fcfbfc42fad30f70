"""What a worker keeps and hands over of its training: checkpoints on disk, and states in memory files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool.runtime.checkpoint import Checkpoints, load
from carpool.runtime.errors import CheckpointError
from carpool.runtime.faults import Faults
from carpool.runtime.mirror import read_mirror, write_mirror
from carpool.runtime.trainer import Trainer

_PART = "optimizer_part"


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


def publish(trainer: Trainer, fd: int, part: range | None = None) -> None:
    """Write the state into a memory file, or of the optimizer only what belongs to a range of parameters."""
    state = trainer.state_dict() if part is None else {_PART: _optimizer_part(trainer, part)}
    try:
        write_mirror(fd, trainer.cursor.step, state)
    except OSError as error:
        raise CheckpointError(f"the mirror was not written: {error.strerror}") from error


def take_over(trainer: Trainer, fds: Sequence[int], path: str) -> None:
    """Go on from a state in memory files (whole in the first, parts of the optimizer in the rest), or on disk."""
    if not fds:
        trainer.load_state_dict(load(Path(path)))
        return
    step, state = read_mirror(fds[0])
    for fd in fds[1:]:
        other, part = read_mirror(fd)
        if other != step or _PART not in part:
            raise CheckpointError(f"a part of the state is of step {other}, the whole of step {step}")
        state["optimizer"]["state"].update(part[_PART])
    trainer.load_state_dict(state)


def _optimizer_part(trainer: Trainer, part: range) -> dict[int, Any]:
    """What the optimizer remembers of these parameters, under the numbers its ``state_dict`` gives them."""
    optimizer, layout = trainer.training.optimizer, trainer.layout
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(held)}
    state = optimizer.state_dict()["state"]
    mine = [numbers[id(layout.parameters[index])] for index in part]
    return {number: state[number] for number in mine if number in state}
