"""Lease of an executor: it may run jobs only while its client has recently answered a heartbeat; pure.

The executor counts from the moment it sent the heartbeat, not from the arrival of the answer, so an answer that a
broken link delivers late extends nothing. The client counts from the moment it sent its last answer, which is later. So
when the lease has ended by the client's count, it has ended by the executor's too, and the executor runs no step.

The client declares the executor lost a margin after the lease. The executor saves its jobs within this margin; later it
writes nothing into their folders, because they may run on another machine.
"""

from __future__ import annotations

from typing import NamedTuple

SILENCE_S = 3.0  # without a heartbeat of a client with a lease, after which jobs that run only here stop
_MARGIN_S = 2.0  # the executor needs a tick to stop its jobs, and time to save them
_MARGIN_SHARE = 0.25  # of the lease, as well


def lost_after_s(lease_s: float) -> float:
    """Seconds after the last answered heartbeat until the client declares the executor lost."""
    return lease_s * (1.0 + _MARGIN_SHARE) + _MARGIN_S


class LeaseEnds(NamedTuple):
    """Instants after which a lease forbids steps and writes; 0: no limit."""

    steps: float = 0.0  # of jobs that run only here: if this machine is declared lost, they are repeated elsewhere
    steps_across_nodes: float = 0.0  # later: a rank that waits for a stopped one would count it as lost
    writes: float = 0.0  # into folders of jobs


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

    @property
    def ends(self) -> LeaseEnds:
        lease_s = self.lease_s
        if not lease_s:
            return LeaseEnds()
        after_s = (min(SILENCE_S, lease_s), lease_s, lost_after_s(lease_s))
        return LeaseEnds(*(self._granted_at + each for each in after_s))

    def is_expired(self, at: float) -> bool:
        return bool(self.lease_s) and at - self._granted_at > self.lease_s
