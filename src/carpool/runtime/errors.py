"""Exceptions raised while a training runs."""

from __future__ import annotations

from carpool.core.errors import CarpoolError


class TrainingError(CarpoolError):
    """The user's training does something unsupported, detected while it ran."""


class Diverged(TrainingError):
    """The loss or a gradient is infinite or NaN."""


class CheckpointError(CarpoolError):
    """A checkpoint cannot be written or read."""


class LeaseEnded(CheckpointError):
    """A checkpoint must not be written: the scheduler may have declared this machine lost."""


class LaneMismatch(CarpoolError):
    """A process did not get the GPU share it was started with, and must not compute."""


class LeaveRequested(CarpoolError):
    """The executor asked a worker to exit."""


class StateLost(CarpoolError):
    """An update failed half-way or the GPU failed: another worker must resume from a mirror."""
