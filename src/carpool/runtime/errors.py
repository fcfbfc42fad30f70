"""Exceptions raised while a training runs."""

from __future__ import annotations

from carpool.core.errors import CarpoolError


class TrainingError(CarpoolError):
    """The user's training did something that cannot be trained with, found while it ran."""


class Diverged(TrainingError):
    """The loss or a gradient is not a finite number any more."""


class CheckpointError(CarpoolError):
    """A checkpoint that cannot be written or read."""


class LaneMismatch(CarpoolError):
    """A process is not on the lane it was started with, and must not compute."""


class LeaveRequested(CarpoolError):
    """A worker was told to leave."""


class StateLost(CarpoolError):
    """An update failed half-way, or the GPU is lost: another process has to go on from a mirror."""
