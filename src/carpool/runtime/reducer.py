"""What adds up the contributions of a formation's ranks: one interface, whatever carries them.

`segment.SegmentReducer` is the one on a node, through shared memory; `group.GroupReducer` the one between nodes, by
messages.
"""

from __future__ import annotations

from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.runtime.flat import Contribution
from carpool.runtime.passes import Gathered, Places, Step


class GivenUp(CarpoolError):
    """A step will not be completed in this formation: somebody is gone, or orders have come."""


class Reducer(Protocol):
    """Lives as long as a formation."""

    def places(self, step: Step, rank: int) -> Places:
        """Where a rank may add up its subtrees so that they need not be copied; empty: nowhere."""
        ...

    def write(self, step: Step, gathered: Gathered) -> None:
        """Give this rank's subtrees to the others."""
        ...

    def total(self, step: Step) -> Contribution:
        """The sum of all ranks' subtrees, once all have given theirs; to be read only, and until the next call."""
        ...
