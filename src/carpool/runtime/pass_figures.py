"""What the pass of a shard may read beside model and samples: the figures that optimizers and schedules keep."""

from __future__ import annotations

from typing import Any

from carpool.runtime.scaling import LossScale
from carpool.runtime.training import Training

Told = tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, Any] | None]


class PassFigures:
    """Learning rates and their like, the schedule and the scale of the loss, of one training."""

    def __init__(self, training: Training, scale: LossScale | None) -> None:
        self._training = training
        self._scale = scale

    def told(self) -> Told:
        """As they are now, for another process that has the same training."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        schedule, scale = self._training.schedule, self._scale
        return (
            groups,
            None if schedule is None else schedule.state_dict(),
            None if scale is None else scale.state_dict(),
        )

    def take(self, told: Told) -> None:
        """Make them as they were told."""
        groups, schedule, scale = told
        for group, figures in zip(self._groups, groups, strict=True):
            group.update(figures)
        if self._training.schedule is not None and schedule is not None:
            self._training.schedule.load_state_dict(schedule)
        if self._scale is not None and scale is not None:
            self._scale.load_state_dict(scale)

    def forget_state(self) -> None:
        """Let what the optimizer remembers of each weight go; a loss that looks for it fails.

        Who only passes shards is not told of it, and what the worker overwrites later would be kept here.
        """
        del self._training.optimizer.state

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._training.optimizer.param_groups
        return groups
