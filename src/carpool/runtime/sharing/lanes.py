"""GPU lanes: MPS percentage of a share, jobs per device, and fault isolation after a GPU error; pure.

There are two kinds of lane. With MPS (mps.py) a share is a process with a cap on the multiprocessors it sees, so that
several jobs compute at the same time; the cap binds at the process's start, and another share is another process.
Without it (`slice`) jobs take turns, step by step, each with the whole GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from carpool.jobs.devices import LocalDevice

WHOLE = 100  # percent

MAX_MPS_CLIENTS = 48  # of MPS on one GPU (NVIDIA, Multi-Process Service: limitations)

K = TypeVar("K", bound=Hashable)


def percent(fraction: float) -> int:
    """A fraction of a GPU as the cap of its lane."""
    return max(1, min(WHOLE, round(WHOLE * fraction)))


def max_concurrent_jobs(device: LocalDevice, *, has_lanes: bool, has_cap: bool = False) -> int:
    """How many jobs compute on a device at the same time; more of them take turns, and all do under a memory cap."""
    if has_cap:
        return 0
    if device.cuda is None:
        return max(1, len(device.cores))
    return MAX_MPS_CLIENTS if has_lanes else 1


class FaultIsolation(Generic[K]):
    """After a fault on a GPU: its clients come back one by one, so that the next fault has a name.

    A fault of one client of MPS ends all clients of that GPU, and nothing says whose it was. So all of them leave, and
    each goes on alone from its mirror until it has passed the step it was in; whoever faults alone is to blame. They
    keep the size of their lanes, and with it their bits.
    """

    def __init__(self) -> None:
        self._leaving: set[K] = set()  # clients of the old server that have not gone yet
        self._suspects: list[str] = []  # jobs, in the order they are let in
        self._goals: dict[str, int] = {}  # steps after which a job is cleared

    @property
    def is_on(self) -> bool:
        """Whether anybody is still suspected."""
        return bool(self._suspects or self._leaving)

    def fault(self, clients: Iterable[K], jobs: Iterable[tuple[str, int]]) -> bool:
        """A fault hit these clients, of these jobs with the steps they have done; whether somebody is to blame for it.

        One who is let in alone and faults is to blame, and stays the only one until the job has passed or ended.
        """
        alone = self._suspects[:1]
        self._leaving.update(clients)
        jobs = list(jobs)
        if [job for job, _ in jobs] == alone or len(jobs) == 1:
            return True
        for job, steps in jobs:
            if job not in self._goals:
                self._suspects.append(job)
            self._goals[job] = max(steps + 1, self._goals.get(job, 0))  # a mirror may lie far behind
        return False

    def drain(self, clients: Iterable[K]) -> None:
        """These have to leave before anybody may start; nobody is suspected."""
        self._leaving.update(clients)

    def is_leaving(self, client: K) -> bool:
        """Whether a client has been told to leave."""
        return client in self._leaving

    def gone(self, client: K) -> None:
        """A client has left."""
        self._leaving.discard(client)

    def passed(self, job: str, steps: int) -> None:
        """A job has done so many steps."""
        if job in self._goals and steps >= self._goals[job]:
            self.over(job)

    def over(self, job: str) -> None:
        """A job is cleared, or has ended."""
        if job in self._goals:
            del self._goals[job]
            self._suspects.remove(job)

    def may_start(self, job: str) -> bool:
        """Whether a client of this job may start now."""
        return not self._leaving and (not self._suspects or self._suspects[0] == job)
