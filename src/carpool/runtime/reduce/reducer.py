"""Reducer interface: sums the contributions of all ranks of a step.

`ShmReducer` works through shared memory on one node, `ProcessGroupReducer` by messages between nodes.
"""

from __future__ import annotations

from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.runtime.engine.early_gradients import GradientsReady
from carpool.runtime.engine.flat_buffers import Contribution
from carpool.runtime.engine.forward_backward import Contributions, ContributionSlots, Step


class StepAborted(CarpoolError):
    """A step cannot be completed in this process group: a rank is lost, or new orders have arrived."""


class Reducer(Protocol):
    """Sums contributions for the lifetime of a process group."""

    def slots(self, step: Step, rank: int) -> ContributionSlots:
        """Memory into which a rank can sum its subtrees without a copy; empty if there is none."""

    @property
    def ready(self) -> GradientsReady | None:
        """Sends gradients during the backward pass; None if they are only sent by `write`."""

    def write(self, step: Step, contributions: Contributions) -> None:
        """Publish this rank's subtrees to the other ranks."""

    def total(self, step: Step) -> Contribution:
        """Sum the subtrees of all ranks after all have written; read-only, and valid until the next call."""
