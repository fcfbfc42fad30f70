"""When enough is enough: losses of workers without progress in between fail a job; pure."""

from __future__ import annotations


class Losses:
    """Counts lost formations since the last step was completed, and workers lost before they could join."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self.high = 0  # most steps ever seen done
        self._high_then = -1  # at the last loss
        self._lost = 0
        self._stillborn: dict[int, int] = {}  # by device

    def progressed(self, step: int) -> None:
        """So many steps are done. Steps made again after a loss are no progress."""
        self.high = max(self.high, step)

    def lost(self) -> str:
        """A formation lost a worker; why that is the end, or nothing."""
        self._lost = 1 if self.high > self._high_then else self._lost + 1
        self._high_then = self.high
        if self._lost < self._retries:
            return ""
        return f"workers were lost {self._lost} times without completing step {self.high + 1}"

    def lost_before_joining(self, device: int) -> str:
        """A newcomer was lost; why that is the end, or nothing."""
        self._stillborn[device] = self._stillborn.get(device, 0) + 1
        if self._stillborn[device] < self._retries:
            return ""
        return f"its worker was lost {self._stillborn[device]} times before it could join"

    def joined(self, device: int) -> None:
        """A worker takes part."""
        self._stillborn.pop(device, None)
