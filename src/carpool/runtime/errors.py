"""What can go wrong while a training runs."""

from __future__ import annotations

from carpool.core.errors import CarpoolError


class TrainingError(CarpoolError):
    """The user's training did something that cannot be trained with, found while it ran."""


class Diverged(TrainingError):
    """The loss or a gradient is not a finite number any more."""


class CheckpointError(CarpoolError):
    """A checkpoint that cannot be written or read."""
