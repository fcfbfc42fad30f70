"""GPU lanes: MPS percentage of a share, jobs per device, and fault isolation after a GPU error; pure.

With MPS a share of a GPU is a process with a cap on the multiprocessors it may use, so that several jobs compute at the
same time. The cap is fixed when the process starts; another share needs another process. Without MPS jobs are
time-sliced, step by step, each with the whole GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from carpool.core.model import WHOLE
from carpool.jobs.devices import LocalDevice, devices_of_gpu

MAX_MPS_CLIENTS = 48  # per GPU (NVIDIA, Multi-Process Service: limitations)

K = TypeVar("K", bound=Hashable)


def percent(fraction: float) -> int:
    """The MPS percentage of a fraction of a GPU."""
    return max(1, min(WHOLE, round(WHOLE * fraction)))


def max_mps_clients(devices: Iterable[LocalDevice], device: LocalDevice) -> int:
    """How many MPS clients a device may have: the lanes of a GPU divide those of the GPU."""
    return max(1, MAX_MPS_CLIENTS // len(devices_of_gpu(devices, device)))


def max_concurrent_jobs(
    devices: Iterable[LocalDevice], device: LocalDevice, *, has_lanes: bool, has_cap: bool = False
) -> int:
    """How many jobs may compute on a device at once; with more, all are time-sliced. 0 under a memory cap."""
    if has_cap:
        return 0
    if device.cuda is None:
        return max(1, len(device.cores))
    return max_mps_clients(devices, device) if has_lanes else 1


class FaultIsolation(Generic[K]):
    """Finds the job behind a GPU fault by restarting its clients one job at a time.

    A fault of one MPS client ends all clients of that GPU, and nothing shows which one caused it. So all of them exit,
    and each job then runs alone, in its old lane, until it has passed the step it was in. A job that faults alone is to
    blame.
    """

    def __init__(self) -> None:
        self._exiting: set[K] = set()  # clients of the old server
        self._suspects: list[str] = []  # jobs, in the order in which they run alone
        self._cleared_at: dict[str, int] = {}  # steps after which a job is cleared

    @property
    def is_active(self) -> bool:
        return bool(self._suspects or self._exiting)

    def on_fault(self, clients: Iterable[K], jobs: Iterable[tuple[str, int]]) -> bool:
        """Start isolation for these clients and jobs (with their steps). Returns whether a single job is to blame."""
        alone = self._suspects[:1]
        self._exiting.update(clients)
        jobs = list(jobs)
        if [job for job, _ in jobs] == alone or len(jobs) == 1:
            return True
        for job, steps in jobs:
            if job not in self._cleared_at:
                self._suspects.append(job)
            # the job may resume from an older mirror, so keep the highest step
            self._cleared_at[job] = max(steps + 1, self._cleared_at.get(job, 0))
        return False

    def drain(self, clients: Iterable[K]) -> None:
        self._exiting.update(clients)

    def is_exiting(self, client: K) -> bool:
        return client in self._exiting

    def on_exit(self, client: K) -> None:
        self._exiting.discard(client)

    def on_progress(self, job: str, steps: int) -> None:
        if job in self._cleared_at and steps >= self._cleared_at[job]:
            self.clear(job)

    def clear(self, job: str) -> None:
        """Stop suspecting a job: it passed its step, or has ended."""
        if job in self._cleared_at:
            del self._cleared_at[job]
            self._suspects.remove(job)

    def may_start(self, job: str) -> bool:
        return not self._exiting and (not self._suspects or self._suspects[0] == job)
