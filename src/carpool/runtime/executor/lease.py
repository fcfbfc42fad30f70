"""Lease of an executor: it may run jobs only while its client has recently answered a heartbeat; pure.

The executor counts from the moment it sent the heartbeat, not from the arrival of the answer, so an answer that a
broken link delivers late extends nothing. The client counts from the moment it sent its last answer, which is later. So
when the lease has ended by the client's count, it has ended by the executor's too, and the executor runs no step.
"""

from __future__ import annotations


class Lease:
    """Heartbeats that were sent and the newest that was answered."""

    def __init__(self, lease_s: float, at: float) -> None:
        self.lease_s = lease_s  # 0: unlimited
        self._granted_at = at
        self._last = 0
        self._sent: dict[int, float] = {}  # by number, not answered yet

    def beat(self, at: float) -> int:
        """The number of a heartbeat that is sent now."""
        self._last += 1
        self._sent[self._last] = at
        return self._last

    def renew(self, number: int) -> None:
        """The client has answered a heartbeat."""
        at = self._sent.pop(number, None)
        if at is not None:
            self._granted_at = max(self._granted_at, at)
            self._sent = {other: sent for other, sent in self._sent.items() if other > number}

    def left_s(self, at: float) -> float | None:
        """Seconds until it ends; None: it does not."""
        return self._granted_at + self.lease_s - at if self.lease_s else None

    def is_expired(self, at: float) -> bool:
        return bool(self.lease_s) and at - self._granted_at > self.lease_s
