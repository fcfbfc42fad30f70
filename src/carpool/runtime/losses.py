"""When enough is enough: losses of workers without progress in between fail a job; pure."""

from __future__ import annotations


class Losses:
    """Counts workers lost in the same step until that step is completed, and workers lost before they could join.

    After a loss steps are made again from the last mirror, so that a later loss may hit an earlier step: that is bad
    luck, and counts for that step. A step that kills its worker each time does so at the same place.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self.high = 0  # most steps ever seen done
        self._lost: dict[int, int] = {}  # by steps done before the one that was being made
        self._stillborn: dict[int, int] = {}  # by device

    def progressed(self, step: int) -> None:
        """So many steps are done."""
        self.high = max(self.high, step)
        for earlier in [known for known in self._lost if known < step]:
            del self._lost[earlier]

    def lost(self, step: int) -> str:
        """A formation lost a worker when so many steps were done; why that is the end, or nothing."""
        self._lost[step] = self._lost.get(step, 0) + 1
        if self._lost[step] < self._retries:
            return ""
        return f"workers were lost {self._lost[step]} times without completing step {step + 1}"

    def lost_before_joining(self, device: int) -> str:
        """A newcomer was lost; why that is the end, or nothing."""
        self._stillborn[device] = self._stillborn.get(device, 0) + 1
        if self._stillborn[device] < self._retries:
            return ""
        return f"its worker was lost {self._stillborn[device]} times before it could join"

    def joined(self, device: int) -> None:
        """A worker takes part."""
        self._stillborn.pop(device, None)
