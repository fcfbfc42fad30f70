"""MPS admission: decides when a worker may start on a GPU, handles GPU faults, restarts the daemon.

Without MPS every worker starts at once, without a lane, and a fault is blamed on the job that reports it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from carpool.core.model import WHOLE
from carpool.jobs.devices import LocalDevice
from carpool.logs import log_event
from carpool.runtime.job_state.types import WorkerSlot
from carpool.runtime.process.worker_pool import WorkerKey
from carpool.runtime.sharing.lanes import FaultIsolation, percent
from carpool.runtime.sharing.mps_daemon import MpsDaemon, MpsUnavailable, is_mps_error

_MAX_MISMATCHES = 3  # lanes not given to workers although the daemon was running
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWorker:
    """A worker to be started."""

    key: WorkerKey
    device: int
    lane: int
    threads: int


class MpsAdmission:
    """Admits workers to the lanes of one node's GPUs."""

    def __init__(
        self,
        devices: Sequence[LocalDevice],
        *,
        enabled: bool,
        on_change: Callable[[], object],  # a waiting worker may be able to start, or lanes were turned off
        note: Callable[[str], object],  # for the stories of all jobs on a GPU
        make_daemon: Callable[[], MpsDaemon] = MpsDaemon,
    ) -> None:
        self._devices = {device.id: device for device in devices}
        self._gpus = {device.id: device.cuda for device in devices if device.cuda is not None}
        by_gpu = {gpu: FaultIsolation[WorkerKey]() for gpu in self._gpus.values()}
        self._isolation = {device: by_gpu[gpu] for device, gpu in self._gpus.items()}  # of all lanes of a GPU
        self._on_change = on_change
        self._note = note
        self._make_daemon = make_daemon
        self._daemon: MpsDaemon | None = None
        self._restarting: asyncio.Task[None] | None = None
        self.waiting: list[PendingWorker] = []
        self._mismatches = 0
        self.unavailable = "" if enabled else "MPS is turned off"  # why there are no lanes
        self._never_started = ""  # the reason, if there were none from the start

    @property
    def has_lanes(self) -> bool:
        """Whether jobs that share a GPU compute at the same time."""
        return bool(self._gpus) and not self.unavailable

    async def start(self) -> None:
        if self.has_lanes:
            await self._start_daemon()
        self._never_started = self.unavailable

    async def stop(self) -> None:
        """Stop the daemon; its clients must have exited."""
        if self._restarting is not None:
            self._restarting.cancel()
        if self._daemon is not None:
            await self._daemon.quit()

    def environment(self, device: int, lane: int) -> dict[str, str]:
        if self._daemon is None or device not in self._gpus or not self.has_lanes:
            return {}
        return self._daemon.environment(lane)

    def command_environment(self, slots: Sequence[WorkerSlot]) -> dict[str, str]:
        """Variables that make a command a client of MPS where it has a share of a GPU; none on whole GPUs.

        On lanes it gets their percentage. On a share of a whole GPU it gets 100 %: a percentage cannot change while a
        process runs, so a lower one would still hold when the neighbours have ended.
        """
        sums: dict[int, float] = {}
        for slot in slots:
            device = self._devices[slot.device]
            if device.cuda is not None and (device.is_lane or slot.fraction < 1.0):
                part = device.lane_percent * slot.fraction / WHOLE if device.is_lane else 1.0
                sums[device.cuda] = sums.get(device.cuda, 0.0) + part
        return self.environment(slots[0].device, percent(min(sums.values()))) if sums else {}

    def lane_problem(self, devices: Iterable[int]) -> str:
        """Why a job cannot run on these devices: lanes of a GPU, and MPS did not start; empty if it can."""
        own = [self._devices[device] for device in devices if device in self._devices]
        lane = next((device for device in own if device.is_lane), None)
        if lane is None or not self._never_started:
            return ""
        return f"{lane.name} is a lane of a GPU, which needs MPS: {self._never_started}"

    def allows_warm_processes(self, device: int) -> bool:
        if not self.has_lanes or device not in self._gpus:
            return True
        return self._is_running and not self._isolation[device].is_active

    def admit(self, worker: PendingWorker) -> bool:
        """Whether a worker may start now; if not, it waits for `take_admitted`."""
        if not self.has_lanes or worker.device not in self._gpus:
            return True
        if self._is_running and self._isolation[worker.device].may_start(worker.key[0]):
            return True
        if worker not in self.waiting:
            self.waiting.append(worker)
        return False

    def take_admitted(self) -> list[PendingWorker]:
        admitted = [worker for worker in self.waiting if self.admit(worker)]
        self.waiting = [worker for worker in self.waiting if worker not in admitted]
        return admitted

    def cancel(self, key: WorkerKey) -> bool:
        """Remove a waiting worker; False if it was not waiting."""
        before = len(self.waiting)
        self.waiting = [worker for worker in self.waiting if worker.key != key]
        return len(self.waiting) < before

    def is_waiting(self, key: WorkerKey) -> bool:
        return any(worker.key == key for worker in self.waiting)

    def is_exiting(self, device: int, key: WorkerKey) -> bool:
        return device in self._gpus and self._isolation[device].is_exiting(key)

    def on_fault(self, device: int, error: str, clients: Sequence[WorkerKey], jobs: Sequence[tuple[str, int]]) -> bool:
        """Make all clients of a GPU exit after a fault. Returns whether a single job is to blame."""
        if not self._is_running or is_mps_error(error):
            self._isolation[device].drain(clients)
            return False
        return self._isolation[device].on_fault(clients, jobs)

    def on_exit(self, device: int, key: WorkerKey) -> None:
        if device in self._gpus:
            self._isolation[device].on_exit(key)

    def on_progress(self, device: int, job: str, steps: int) -> bool:
        """Record a job's steps. Returns whether waiting workers may be able to start now."""
        if device not in self._gpus or not self._isolation[device].is_active:
            return False
        self._isolation[device].on_progress(job, steps)
        return True

    def on_lane_mismatch(self, error: str) -> None:
        """Count a worker that did not get its lane; after a few, turn lanes off.

        Not counted while the MPS daemon is dead. The worker is replaced either way.
        """
        self._mismatches += self._is_running
        if self._mismatches >= _MAX_MISMATCHES and self.has_lanes:
            self._turn_off(f"workers do not get their GPU share ({error})")
            self._on_change()

    def on_job_end(self, job: str) -> None:
        for isolation in self._isolation.values():
            isolation.clear(job)

    def tick(self) -> None:
        if self._daemon is not None and not self._daemon.is_alive and self._restarting is None:
            self._restarting = asyncio.create_task(self._restart())

    @property
    def _is_running(self) -> bool:
        return self._daemon is not None and self._daemon.is_alive

    async def _start_daemon(self) -> None:
        daemon = self._make_daemon()
        try:
            await daemon.start()
        except (MpsUnavailable, OSError) as error:
            self.unavailable = str(error)
            log_event(_log, "mps_unavailable", reason=self.unavailable)
        else:
            self._daemon = daemon

    async def _restart(self) -> None:
        if self._daemon is not None:
            dead, self._daemon, self._mismatches = self._daemon, None, 0
            await dead.quit()
        log_event(_log, "mps_daemon_died", level=logging.WARNING)
        self._note("the MPS daemon died; restarting it")
        await self._start_daemon()
        if self.unavailable:
            self._turn_off(self.unavailable)
        else:
            log_event(_log, "mps_daemon_restarted")
        self._restarting = None
        self._on_change()

    def _turn_off(self, reason: str) -> None:
        self.unavailable = reason
        log_event(_log, "mps_disabled", level=logging.WARNING, reason=reason)
        self._note(f"jobs that share a GPU are time-sliced from now on: {reason}")
