"""Reducer interface: sums the contributions of all ranks of a step.

`segment.SegmentReducer` is the one on a node, through shared memory; `group.GroupReducer` the one between nodes, by
messages.
"""

from __future__ import annotations

from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.runtime.engine.flat_buffers import Contribution
from carpool.runtime.engine.forward_backward import Contributions, ContributionSlots, Step


class StepAborted(CarpoolError):
    """A step will not be completed in this formation: somebody is gone, or orders have come."""


class Reducer(Protocol):
    """Lives as long as a formation."""

    def places(self, step: Step, rank: int) -> ContributionSlots:
        """Where a rank may add up its subtrees so that they need not be copied; empty: nowhere."""
        ...

    def write(self, step: Step, gathered: Contributions) -> None:
        """Give this rank's subtrees to the others."""
        ...

    def total(self, step: Step) -> Contribution:
        """The sum of all ranks' subtrees, once all have given theirs; to be read only, and until the next call."""
        ...
